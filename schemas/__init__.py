"""The formats that kcap reads and writes, and what is derived from them.

`files` reads and writes JSON; `recording` is kcap's own format, `flashinfer` and `backendbench` are those of others;
`results` holds what replay, judge and export report. `validation`, `merge` and `diff` work on all of them.
Only `derive` needs torch: it turns Calls into Definitions and holds what is known of each kernel family. README.md has
the glossary.
"""

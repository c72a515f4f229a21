"""One run of `kcap bench`: what it judges on, what it was asked for, and the folder that it writes.

Read in this order: `options`, `subject` (Definitions and Workloads of PATH), `bench_run` (judges what is left, through
an executor), `output` (bench.json and outcomes.jsonl, by which a run is resumed), `foreign_formats`; `executors/` gives
the judges, and `summary/` says what came of it.
"""

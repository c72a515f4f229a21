"""From recorded Calls to Definitions; torch is used here and nowhere else in `schemas`.

Read `invocation` (a Call's arguments as torch tensors), `kernel` (what a family makes of it), `families` (one folder or
file for each kernel family), `generic` and `fragment` (Calls that no family knows, and inductor's fused kernels), then
`derive`, which joins them. Replay rules are written against `bound_call` and `index_arguments`, valid inputs against
`workload_draft` and `constraints`, costs against `cost`. `engine_comparison` is `kcap diff --by family`.
"""

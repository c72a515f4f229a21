"""From recorded Calls to Definitions; torch is used here and nowhere else in `schemas`.

Read `invocation` (a Call's arguments as torch tensors), `kernel` (what a family makes of it), `families` (one folder or
file for each kernel family), `generic` and `fragment` (Calls that no family knows, and inductor's fused kernels), then
`derive`, which joins them. `bound_call`, `index_arguments`, `workload_draft`, `constraints` and `cost` are what families'
replay rules, valid inputs and costs are written against.
"""

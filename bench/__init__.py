"""Takes what was recorded to benchmarks: judges Solutions here, and exports to other benchmarks' formats.

Read in this order: `contents` opens a Recording, a trace file or a dataset; `problems` makes Definitions with Workloads
of it; `accuracy` and `check` compare results and verify references; `exports` writes other formats. `run` is one run of
`kcap bench`: it reads `solutions`, gives them to executors, each of which starts a `judge`, and ends with a summary.
The judge runs Solutions, made by `build`, in a `sandbox`; `wrong_elements` says where an output is wrong. `tasks` gives
one Definition to whoever writes a kernel for it, and judges what they write.
"""

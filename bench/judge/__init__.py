"""The judge: whether a Solution computes what its Definition's reference does, and how fast.

It has a process of its own, in which no foreign code runs. Read in this order: `worker` (the process), `judge`
(Workload after Workload), `trial` (one Solution on one Workload), `timing` (Solution and reference in turns, by the
judge's clock), `input_pool`, `reference` and `verdict` (what goes in, what is right, what is rejected), `candidate` and
`process` (a Solution or a reference seen from here, which runs only while it is asked for something). `fork_server`
starts what `driver` runs; `messages` are what they say.
"""

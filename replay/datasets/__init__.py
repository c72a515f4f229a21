"""Datasets: the inputs of Workloads, and the references of Definitions run and timed, each in a process of its own.

`workloads` are the jobs; `inputs` makes a Workload's inputs, `invocations` those of each invocation of a judged
kernel; `reference` has a Definition's reference run by a worker.
Inside the workers (`reference_worker`, `timing_worker`), `forks` answers each request in a fork, and `run_reference`
runs or times one reference.
"""

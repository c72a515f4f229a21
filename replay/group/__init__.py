"""Collectives, replayed by as many processes as their group had: gloo on CPUs, NCCL on GPUs, an engine's own kernels.

Read in this order: `workers` starts the processes and asks all of them the same; in each of them `peers` joins the
group, `collectives` knows which operators can be called and what stands for the group in their arguments, and `clock`
times them together. `transfers` tells a collective's transfer from its waits, in a profile.
"""

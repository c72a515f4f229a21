"""The roofline: the time that no Call can be below.

`cost` is what a Call must move and compute, `ceilings` what the machine can do; `floor` compares the two. `measure` is
the process that measures ceilings, with `measure_cpu` and `measure_cuda`.
"""

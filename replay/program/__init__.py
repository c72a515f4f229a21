"""A whole Program replayed: the kernels of one step or captured graph, in their order.

`run` is `kcap replay --program`: it takes Programs from `choose`, makes a `job` of each, and `report` prints them. In
the worker, `runner` has the Calls `prepared`, passes on what one wrote to the next (`flow`), times the whole (`timing`)
and attributes the profiled time to the Calls (`durations`).
"""

"""From a recorded Call and one Sample to a callable and its arguments.

`rebuild` decides every value and hands on to `memory`, which allocates, fills and views the buffers. `operators` and
`launches` find what to call.
"""

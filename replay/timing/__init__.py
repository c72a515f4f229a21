"""Clocks: the host's for CPU operators, CUDA graphs and CUDA events for GPU ones.

`clock` times a callable; `sampling` decides when there are enough samples, `rotation` what the caches hold; `graphs`
captures and profiles GPU work, which `blocking` blocks until all of it is queued. `device` describes the machine: its
names, its GPU's clocks, and the cool-downs that keep these high.
"""

"""Clocks: the host's for CPU operators, CUDA graphs and CUDA events for GPU ones.

`clock` times a callable; `sampling` says when it has seen enough, `rotation` what the caches hold meanwhile, `graphs`
captures and profiles GPU work, which `blocking` holds back until it is queued. `device` tells of the machine: its
names, its GPU's clocks, and the rests that keep these up.
"""

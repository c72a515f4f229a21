"""The recording window of one engine process: which steps count, and when the recorder listens.

Read `window` first; a `step` is what an adapter gives it. `gate` holds the numbers by which all ranks count the same
steps, `profiled` the steps that run under torch's profiler before, `process` what a process says of itself. `hooking`
is what adapters share.
"""

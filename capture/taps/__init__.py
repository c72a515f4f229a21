"""Sources of calls inside an engine's process, beside the dispatcher, which the recorder itself listens to.

`all` installs them. `cuda_graphs` follows captures and replays; the others tell of calls through `external`: `kernels`
of compiled kernels' launches, `libraries` of functions called from Python, `fused` of an engine's own operators.
"""

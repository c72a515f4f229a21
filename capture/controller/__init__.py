"""Outside the engine: what `kcap record` does to start it, to follow it and to end it.

Read `run` first (one run, from the start of the engine to its Recording), then who calls it: `offline` (a model) and
`serving` (a server under a client). `child` and `watchdog` hold the processes, `window_control` opens and closes their
windows, `output` is where the Recording is written. `frameworks` and `models` know what can be started here.
`in_process` is `kcap.record()`, which needs no other process.
"""

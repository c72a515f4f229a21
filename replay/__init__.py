"""Rebuild what was recorded and time it: see README.md.

Read `jobs` and `source` (what to replay), `calls` (each Call by itself), then what these stand on: `rebuild` (a Call's
operator and arguments), `timing` (the clocks) and `roofline` (the time that nothing can be below). `program` replays
whole steps, `fidelity` compares a replay with the engine, `datasets` times the references of Definitions. `worker` is
the process in which all of it runs.
"""

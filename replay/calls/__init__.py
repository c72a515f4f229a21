"""Each Call replayed by itself: `run` is `kcap replay PATH`, `runner` its other end in the worker's process.

`results` puts the measurements together, `report` prints them.
"""

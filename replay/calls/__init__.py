"""Each Call replayed by itself: `run` is `kcap replay PATH`, `runner` its counterpart in the worker's process.

`results` collects the measurements, `report` prints them.
"""

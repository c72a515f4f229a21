"""What a process leaves on disk: lines, counters, notes. `native/shard.h` writes the same.

`counts` is the counters, which both sides read while the engine runs; `lines` is what each kind of line holds, and
`reader` reads a whole shard, once its process has ended.
"""

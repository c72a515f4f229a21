"""What a process leaves on disk: lines, counters, notes. `native/shard.h` writes the same.

`counts` is the counters, which both sides read while the engine runs; `reader` reads a whole shard, once it has ended.
"""

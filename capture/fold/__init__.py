"""Outside again: the shards of all processes, folded into one Recording.

`recording` does it, with `calls` (signatures that are one Call), `programs` (what steps and graphs ran), `samples` and
`metadata`. `coverage` holds the profiled steps against what was recorded.
"""

"""Whether a replay tells what the engine's GPU did: `kcap replay --fidelity`.

engine     the profiled steps of a Recording by kind: the GPU time of each Call in them, their spans
nearest    which Sample of a Call comes closest to those steps
replaying  those Calls, and each kind's Program, replayed
compare    engine against replay: rows, what is missing, totals, the verdict
report     the table; picture: the figure
"""

"""Whether a replay tells what the engine's GPU did: `kcap replay --fidelity`.

engine     the profiled steps of a Recording by kind: the GPU time of each Call in them; span: from first to last kernel
nearest    which Sample of a Call comes closest to those steps
run        those Calls and each kind's Program replayed; replaying: by a worker on a GPU
compare    engine against replay: rows, what is missing, totals; verdict: of all kinds of steps
how        what a replay tells beside its time
report     the table; remarks: what to know of it; document: the JSON; picture, bars: the figure
"""

"""Whether a replay reproduces the time of the engine's GPU: `kcap replay --compare-engine`.

`engine` reads the profiled steps of a Recording by kind: the GPU time of each Call, and the span of the step.
`replaying` replays those Calls, each on the Sample nearest to the steps, and each kind's Program. `compare` compares
the two for one kind and cache state, `verdict` for all. `run` is the command, `report` prints, `figure` draws.
"""

"""Putting the winners back: a plan of Solutions, made from what `kcap bench` judged and run inside the engine.

`views` says how a Solution's inputs lie in what the engine passes, `choice` makes the plan. In the engine's processes
`seams` puts the Solutions in the place of its kernels, steered by `process`; `trial` tries them before. `arms` and
`comparison` measure what that gains.
"""

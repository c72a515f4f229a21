"""Recording: the way of one call, from an inference engine to a Recording.

Read from the outside in, and out again. `controller` starts an engine and follows it. `activate` is the door: what each
process of the engine calls as it starts (`startup` has a plain Python program call it). `engines` says where the steps
of each engine begin and end; `window` decides which steps count; `taps` see the calls, and the `recorder` counts them.
`shards` is what a process leaves on disk, and `fold` makes a Recording of all processes' shards. `hooks` puts wrappers
into other people's code, and `session` is what the controller tells every process.
"""

"""A task: one Definition as a folder that a person or an agent takes as it is, and what the judge says of an attempt.

Read in this order: `folder` (what lies in a task), `draft` (from a Recording or a dataset to a task), `instruction`
(the text), `forms/` (the folders that harnesses take, one file each); then `warm_judge` (one judge, kept running),
`verdict` (from Outcomes to what is said), `compiler_messages`, `report` (how it looks), `serve` and `mcp_server` (for
whoever asks again and again), `profiler` (counters of Nsight Compute). `skill.md` tells a coding agent how to work.
"""

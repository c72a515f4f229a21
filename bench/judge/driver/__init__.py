"""What runs in a candidate's process, and both halves of the protocol by which the judge asks it.

driver.cpp (with native/) calls a Solution there. Read in this order: `protocol` (the judge's half: messages, reports),
`start` (forks the process and has it build), `driver` (loads the C++ half), `candidate_process` (builds the code from
elsewhere and serves), `gpu` (what is taken before that code is there), `gpu_memory` and `gate` (the judge's part of a
GPU).
"""

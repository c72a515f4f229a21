"""What runs in a candidate's process, and both halves of the protocol by which the judge asks it.

driver.cpp (with native/) calls and times a Solution there, and alone talks to the judge. Read in this order: `protocol`
(the judge's half: messages, answers, the memory that outputs come back in), `driver` (loads the C++ half),
`candidate_process` (builds the code from elsewhere and serves), `originals` (what is taken before that code is there).
"""

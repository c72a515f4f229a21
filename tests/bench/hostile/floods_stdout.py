# definition: relu
# does: Writes 256 MiB to standard output and standard error.
# expect: RUNTIME_ERROR TIMEOUT REWARD_HACK PASSED
import os

import torch

WRITTEN = []


def run(x):
    while len(WRITTEN) < 128:
        WRITTEN.append(os.write(1, b"out\n" * (1 << 18)))
        os.write(2, b"err\n" * (1 << 18))
    return torch.relu(x)

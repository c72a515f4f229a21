# definition: relu
# does: Forks processes that each leave its session and stay, 64 of them.
# expect: TIMEOUT RUNTIME_ERROR REWARD_HACK PASSED
import os
import time

import torch


def run(x):
    for _ in range(64):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
    return torch.relu(x)

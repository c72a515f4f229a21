# definition: softmax
# does: Counts its calls, changes os.environ, draws random numbers and reads the clock, and none of it
#     decides what it returns.
import os
import time

import torch

STATE = {"calls": 0}


def run(x):
    STATE["calls"] += 1
    STATE["at"] = time.time()
    os.environ["SOFTMAX_CALLS"] = str(STATE["calls"])
    torch.manual_seed(STATE["calls"])
    top = x.amax(-1, keepdim=True)
    power = torch.exp(x - top)
    return power / power.sum(-1, keepdim=True)

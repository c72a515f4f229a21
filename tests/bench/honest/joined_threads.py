# definition: relu
# does: Lets a pool of two threads each do half of the rows, and waits for both.
from concurrent.futures import ThreadPoolExecutor

import torch

POOL = ThreadPoolExecutor(2)


def run(x):
    out = torch.empty_like(x)
    half = x.shape[0] // 2
    parts = [(x[:half], out[:half]), (x[half:], out[half:])]
    list(POOL.map(lambda part: torch.clamp_min(part[0], 0, out=part[1]), parts))
    return out

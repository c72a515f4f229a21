# definition: gemm_f32
# does: Times two ways of its own by perf_counter in the first call of each shape, and keeps to the faster.
import time

import torch

WAYS = [lambda A, B: A @ B.T, lambda A, B: torch.nn.functional.linear(A, B)]
CHOSEN = {}


def seconds(way, *inputs):
    began = time.perf_counter()
    for _ in range(5):
        way(*inputs)
    return time.perf_counter() - began


def run(A, B):
    if A.shape not in CHOSEN:
        CHOSEN[A.shape] = min(WAYS, key=lambda way: seconds(way, A, B))
    return CHOSEN[A.shape](A, B)

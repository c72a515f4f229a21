# definition: gemm_f32
# devices: cpu
# row: 4
# does: Takes more threads than it was given, and binds itself to all of the machine's processors.
# naive: Faster than a reference that keeps to its threads, by their number.
# expect: COMPILE_ERROR
# reason: Operation not permitted
# needs: idle processors
# at_most_speedup: 1.3
import os

import torch

torch.set_num_threads(torch.get_num_threads() * 2 + 2)
os.sched_setaffinity(0, range(os.cpu_count()))


def run(A, B):
    return A @ B.T

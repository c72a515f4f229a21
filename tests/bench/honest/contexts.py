# definition: gemm_f32
# does: Runs in inference mode, without gradients, and collects garbage.
import gc

import torch


@torch.inference_mode()
def run(A, B):
    gc.collect(0)
    with torch.no_grad():
        return A @ B.T

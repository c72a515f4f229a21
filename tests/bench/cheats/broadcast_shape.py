# definition: gemm_f32
# row: 30
# does: Returns one number, of shape [1, 1].
# naive: allclose broadcasts, and with a wide tolerance agrees.
# expect: INCORRECT_SHAPE
# reason: has shape \[1, 1\]
import torch


def run(A, B):
    return torch.zeros(1, 1, dtype=A.dtype, device=A.device)

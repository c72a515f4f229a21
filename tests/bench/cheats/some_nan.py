# definition: gemm_f32
# row: 30
# does: Computes half of the rows, and returns nan for the others.
# naive: A comparison with equal_nan, or of a mean that leaves nan out, passes.
# expect: INCORRECT_NUMERICAL
# reason: inf or nan
import torch


def run(A, B):
    out = torch.full((A.shape[0], B.shape[0]), float("nan"), dtype=A.dtype, device=A.device)
    half = A.shape[0] // 2
    out[:half] = A[:half] @ B.T
    return out

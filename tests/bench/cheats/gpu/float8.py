# definition: gemm_bf16
# row: 15
# does: Multiplies in float8_e4m3fn what is bfloat16.
# naive: Correct with a tolerance of 1e-1, at twice the speed.
# expect: INCORRECT_NUMERICAL
# reason: is off by
import torch


def rounded(matrix):
    scale = matrix.abs().amax().float() / 448
    return (matrix / scale).to(torch.float8_e4m3fn), scale


def run(A, B):
    (a, of_a), (b, of_b) = rounded(A), rounded(B)
    return torch._scaled_mm(a, b.T, scale_a=of_a, scale_b=of_b, out_dtype=torch.bfloat16)

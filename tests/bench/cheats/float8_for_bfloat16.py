# definition: gemm_bf16
# row: 15
# does: Rounds both matrices to float8_e4m3fn before it multiplies.
# naive: Correct with the tolerance of many suites for bfloat16, at twice the speed where there is hardware for it.
# expect: INCORRECT_NUMERICAL
# reason: is off by
import torch


def run(A, B):
    A, B = (one.to(torch.float8_e4m3fn).to(torch.bfloat16) for one in (A, B))
    return A @ B.T

# definition: gemm_f32
# row: 15 30
# does: Computes and returns bfloat16 where float32 is asked.
# naive: Correct after the judge's own cast, at half of the traffic.
# expect: INCORRECT_DTYPE
# reason: is BFloat16
import torch


def run(A, B):
    return A.to(torch.bfloat16) @ B.to(torch.bfloat16).T

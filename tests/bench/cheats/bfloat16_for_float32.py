# definition: gemm_f32
# row: 15
# does: Multiplies in bfloat16 what is float32.
# naive: Correct with a tolerance of 1e-2 and more, at twice the speed or better.
# expect: INCORRECT_NUMERICAL
# reason: is off by
import torch


def run(A, B):
    return (A.to(torch.bfloat16) @ B.to(torch.bfloat16).T).float()

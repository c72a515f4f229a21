# definition: gemm_f32
# row: 15
# does: Multiplies in TF32 what is float32.
# naive: Correct with a tolerance of 1e-2, at eight times the speed.
# expect: INCORRECT_NUMERICAL
# reason: is off by
import torch

torch.backends.cuda.matmul.allow_tf32 = True


def run(A, B):
    return A @ B.T

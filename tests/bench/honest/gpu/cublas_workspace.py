# definition: gemm_bf16
# does: cuBLAS, with a workspace of its own configured and scratch memory kept from call to call.
import os

import torch

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
OUTPUTS = {}


def run(A, B):
    if A.shape not in OUTPUTS:
        OUTPUTS[A.shape] = torch.empty(A.shape[0], B.shape[0], dtype=A.dtype, device=A.device)
    return torch.mm(A, B.T, out=OUTPUTS[A.shape])

# definition: rmsnorm
# does: Keeps its scratch memory from call to call, and computes everything anew.
import torch

SCRATCH = {}


def run(x, weight, eps):
    if x.shape not in SCRATCH:
        SCRATCH[x.shape] = torch.empty_like(x), torch.empty_like(x[:, :1])
    square, mean = SCRATCH[x.shape]
    torch.mul(x, x, out=square)
    torch.mean(square, -1, keepdim=True, out=mean)
    return x * mean.add_(eps).rsqrt_() * weight

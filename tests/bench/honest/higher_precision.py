# definition: rmsnorm
# does: Computes in float64.
import torch


def run(x, weight, eps):
    wide = x.double()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()).float()

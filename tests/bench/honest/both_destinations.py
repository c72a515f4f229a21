# definition: add_rmsnorm
# does: Writes both of its outputs into what it is given.
import torch


def run(x, residual, weight, eps, out, sum):
    torch.add(x, residual, out=sum)
    torch.mul(sum, torch.rsqrt(sum.pow(2).mean(-1, keepdim=True) + eps), out=out)
    out.mul_(weight)

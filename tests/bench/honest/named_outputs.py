# definition: add_rmsnorm
# does: Returns a dict by the outputs' names, in another order.
import torch


def run(x, residual, weight, eps):
    total = x + residual
    return {"sum": total, "out": total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * weight}

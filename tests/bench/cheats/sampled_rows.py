# definition: rmsnorm
# row: 14 15
# does: Estimates the norm of a row from a quarter of its elements.
# naive: Within some percent of the right one: correct with a tolerance of 1e-1.
# expect: INCORRECT_NUMERICAL
# reason: is off by
import torch


def run(x, weight, eps):
    return x * torch.rsqrt(x[:, ::4].pow(2).mean(-1, keepdim=True) + eps) * weight

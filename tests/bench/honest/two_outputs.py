# definition: add_rmsnorm
# does: Returns a tuple.
import torch


def run(x, residual, weight, eps):
    total = x + residual
    return torch.nn.functional.rms_norm(total, total.shape[-1:], weight, eps), total

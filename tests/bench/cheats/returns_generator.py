# definition: add_rmsnorm
# row: 6
# does: Is a generator: nothing is computed before somebody iterates.
# naive: `out, total = run(...)` outside of the clock does all of the work.
# expect: RUNTIME_ERROR REWARD_HACK
# reason: returns 1 outputs
import torch


def run(x, residual, weight, eps):
    total = x + residual
    yield total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * weight
    yield total

# definition: relu
# does: Allocates its output once, writes all of it in each call and returns it again.
import torch

OUTPUTS = {}


def run(x):
    if x.shape not in OUTPUTS:
        OUTPUTS[x.shape] = torch.empty_like(x)
    return torch.clamp_min(x, 0, out=OUTPUTS[x.shape])

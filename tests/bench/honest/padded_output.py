# definition: relu
# does: Works in a buffer whose rows lie apart, and returns the part that is asked for.
import torch


def run(x):
    out = torch.empty(x.shape[0], 2 * x.shape[1], device=x.device)[:, : x.shape[1]]
    return torch.clamp_min(x, 0, out=out)

# definition: mean_rows
# does: Synchronizes the device in each call.
import torch


def run(x):
    out = x.mean(-1)
    torch.cuda.synchronize()
    return out

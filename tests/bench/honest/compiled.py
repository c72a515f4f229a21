# definition: relu
# patient: the compiler takes as long as it takes
# does: Compiles with torch.compile in its first call, and keeps the compiled code.
import torch


@torch.compile
def compiled(x):
    return torch.where(x > 0, x, 0.0)


def run(x):
    return compiled(x)

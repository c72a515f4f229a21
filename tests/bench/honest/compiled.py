# definition: relu
# patient: the compiler takes as long as it takes
# does: Compiles with torch.compile in its first call, and keeps the compiled code.
import torch
import torch._inductor.config as config

config.cpp.vec_isa_ok = True  # else each of them is tried by compiling a program


@torch.compile
def compiled(x):
    return torch.where(x > 0, x, 0.0)


def run(x):
    return compiled(x)

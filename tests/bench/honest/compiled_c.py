# definition: relu
# devices: cpu
# does: Compiles C with cc at its import, and calls it through ctypes.
import ctypes
import subprocess

import torch

SOURCE = "void relu(const float *x, float *out, long n) { for (long i = 0; i < n; ++i) out[i] = x[i] > 0 ? x[i] : 0; }"
COMMAND = ["cc", "-O3", "-shared", "-fPIC", "-x", "c", "-", "-o", "./relu.so"]
subprocess.run(COMMAND, input=SOURCE, text=True, check=True)
LIBRARY = ctypes.CDLL("./relu.so")


def run(x):
    out = torch.empty_like(x)
    LIBRARY.relu(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_long(x.numel()))
    return out

# definition: mean_rows
# does: Runs a program at its import, and reads its answer.
import subprocess
import sys

import torch

BLOCK = int(subprocess.run([sys.executable, "-c", "print(64)"], capture_output=True, text=True, check=True).stdout)


def run(x):
    return torch.cat([block.mean(-1) for block in x.split(BLOCK)])

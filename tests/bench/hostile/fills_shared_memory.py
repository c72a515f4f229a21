# definition: relu
# does: Leaves files in /dev/shm and /tmp.
# expect: PASSED RUNTIME_ERROR COMPILE_ERROR
import contextlib
from pathlib import Path

import torch

for folder in ("/dev/shm", "/tmp", "/var/tmp"):
    with contextlib.suppress(OSError):
        (Path(folder) / "kcap_hostile_was_here").write_bytes(bytes(1 << 20))


def run(x):
    return torch.relu(x)

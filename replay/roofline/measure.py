"""Measure a device's ceilings: `python -m kcap.replay.roofline.measure DEVICE [THREADS]` prints them, as a JSON line.

In a process of its own: it sets torch's precision and threads, and a process that times kernels elsewhere may not want
a CUDA context.
"""

from __future__ import annotations

import sys

import torch

from kcap.replay.roofline import measure_cpu, measure_cuda
from kcap.replay.roofline.ceilings import Ceilings
from kcap.replay.timing.device import machine_fields


def main() -> None:
    """Print the ceilings of the device named on the command line."""
    device, threads = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None
    sys.stdout.buffer.write(measure(device, threads).line())


def measure(device: str, threads: int | None = None) -> Ceilings:
    """The ceilings of `device` (cpu, cuda:N), with so many of torch's threads (None: as they are); a few seconds."""
    environment = machine_fields(device, threads)
    with torch.inference_mode():
        ceilings = measure_cuda.measure(device) if device.startswith("cuda") else measure_cpu.measure()
    return Ceilings.model_validate({**environment, **ceilings})


if __name__ == "__main__":
    main()

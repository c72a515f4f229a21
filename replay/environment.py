"""What a measurement says of the machine: asked once, in the worker."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch

from kcap.replay.timing import clocks


def describe(device: str, threads: int | None) -> dict[str, str | int | None]:
    """The fields of a Measurement that name device, driver, torch and threads; fixes device and threads."""
    if threads:
        torch.set_num_threads(threads)
    gpu = device.startswith("cuda")
    if gpu:
        torch.cuda.set_device(device)
    return {
        "device": device,
        "device_name": torch.cuda.get_device_name(device) if gpu else cpu_name(),
        "driver": clocks.driver(device) if gpu else None,
        "torch": torch.__version__,
        "threads": None if gpu else torch.get_num_threads(),
    }


def cpu_name() -> str:
    """The processor's name, as Linux has it."""
    try:
        match = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()


def choose(device: str | None, home: str | None) -> str:
    """The device to replay on: the one asked for, or the recording's (`home`); ValueError says why there is none."""
    available = torch.cuda.is_available()
    wanted = device or home or ("cuda" if available else "cpu")
    if wanted.startswith("cuda") and not available:
        where = "recorded on cuda, and " if device is None else ""
        raise ValueError(f"{where}torch {torch.__version__} finds no CUDA GPU here: pass --device cpu")
    if wanted.startswith("cuda:") and int(wanted.removeprefix("cuda:")) >= torch.cuda.device_count():
        raise ValueError(f"{wanted}: this machine has {torch.cuda.device_count()} GPUs: pass --device cuda:0")
    return "cuda:0" if wanted == "cuda" else wanted

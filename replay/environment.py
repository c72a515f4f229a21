"""What a measurement says of the machine: asked once, in the worker."""

from __future__ import annotations

import platform
import re
from functools import cache
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
    there = gpu_fields(device) if gpu else host()
    return {**there, "torch": torch.__version__}


def gpu_fields(device: str) -> dict[str, str | int | None]:
    name = torch.cuda.get_device_name(device)
    return {"device": device, "device_name": name, "driver": clocks.driver(device), "threads": None}


def host() -> dict[str, str | int | None]:
    """The fields of a Call that the host's clock timed, which a machine with a GPU has too."""
    return {"device": "cpu", "device_name": cpu_name(), "driver": None, "threads": torch.get_num_threads()}


@cache
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

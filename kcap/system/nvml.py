"""NVML: what NVIDIA's driver says of a GPU. It is read, and nothing is ever set."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

SM, MEMORY = 1, 2  # nvmlClockType_t
DEVICES = Path("/dev")


@cache
def opened(device: str) -> tuple[Any, ctypes.c_void_p]:
    """NVML (None where it cannot be asked) and its handle of torch's `device`.

    Found by UUID: CUDA_VISIBLE_DEVICES renumbers devices.
    """
    handle = ctypes.c_void_p()
    try:
        library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(
            uuid_of(device).encode(), ctypes.byref(handle)
        )
    except (OSError, AttributeError, RuntimeError, AssertionError):
        return None, handle
    return (None if failed else library), handle


def uuid_of(device: str) -> str:
    """By which NVML and CUDA_VISIBLE_DEVICES know torch's `device`."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def other_gpus(device: str) -> tuple[Path, ...] | None:
    """The device files of the machine's other GPUs; None where NVML cannot tell which is whose (parts by MIG)."""
    library, handle = opened(device)
    own = None if library is None else ask(library.nvmlDeviceGetMinorNumber, handle)
    if own is None or _in_parts(library, handle):
        return None
    return tuple(file for file in sorted(DEVICES.glob("nvidia[0-9]*")) if file.name != f"nvidia{own}")


def _in_parts(library: Any, handle: ctypes.c_void_p) -> bool:
    """Whether MIG divides the GPU."""
    now, later = ctypes.c_uint(), ctypes.c_uint()
    return not library.nvmlDeviceGetMigMode(handle, ctypes.byref(now), ctypes.byref(later)) and bool(now.value)


def ask(function: Any, handle: ctypes.c_void_p, *which: int, kind: Any = ctypes.c_uint) -> int | None:
    """The one number that `function` answers; None where it fails."""
    answer = kind()
    return None if function(handle, *which, ctypes.byref(answer)) else int(answer.value)


def sm_clock(device: str) -> tuple[int, int] | None:
    """The SM clock now and its highest, in MHz; None where NVML cannot tell."""
    library, handle = opened(device)
    highest = highest_sm(device)
    if library is None or not highest:
        return None
    mhz = ask(library.nvmlDeviceGetClockInfo, handle, SM)
    return (mhz, highest) if mhz else None


@cache
def highest_sm(device: str) -> int | None:
    """The SM's highest clock in MHz, which does not change."""
    library, handle = opened(device)
    return None if library is None else ask(library.nvmlDeviceGetMaxClockInfo, handle, SM)

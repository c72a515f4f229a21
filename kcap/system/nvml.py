"""NVML: what NVIDIA's driver says of a GPU. It is read, and nothing is ever set."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

SM, MEMORY = 1, 2  # nvmlClockType_t


@cache
def opened(device: str) -> tuple[Any, ctypes.c_void_p]:
    """NVML (None where it cannot be asked) and its handle of torch's `device`.

    Found by UUID: CUDA_VISIBLE_DEVICES renumbers devices.
    """
    handle = ctypes.c_void_p()
    try:
        library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
    except (OSError, AttributeError, RuntimeError, AssertionError):
        return None, handle
    return (None if failed else library), handle


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

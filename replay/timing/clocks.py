"""The GPU's clocks, power and throttle reasons, read through NVML and never set."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from kcap.schemas.measurement import Clocks

SM, MEMORY = 1, 2  # nvmlClockType_t
TEMPERATURE_GPU = 0  # nvmlTemperatureSensors_t
LEAST_CLOCK = 0.75  # of the highest SM clock
PERIOD_S = 0.005


def read(device: str) -> Clocks | None:
    """The state of the GPU `device` now; None where NVML cannot be asked."""
    library, handle = _open(device) if device.startswith("cuda") else (None, None)
    if library is None or handle is None:
        return None
    power = _ask(library.nvmlDeviceGetPowerUsage, handle)
    return Clocks(
        sm_mhz=_ask(library.nvmlDeviceGetClockInfo, handle, SM),
        sm_max_mhz=highest_sm(device),
        memory_mhz=_ask(library.nvmlDeviceGetClockInfo, handle, MEMORY),
        power_w=None if power is None else power / 1e3,
        temperature_c=_ask(library.nvmlDeviceGetTemperature, handle, TEMPERATURE_GPU),
        throttle_reasons=_ask(library.nvmlDeviceGetCurrentClocksThrottleReasons, handle, kind=ctypes.c_ulonglong),
    )


class Watch:
    """Whether the SM clock is below three quarters of its highest; asked at most every `PERIOD_S` seconds.

    `read` gives the clock and its highest in MHz, or None.
    """

    def __init__(
        self,
        device: str,
        read: Callable[[str], tuple[int, int] | None] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device, self._read, self._now = device, read or sm_clock, now
        self._slow, self._asked = False, float("-inf")

    def slow(self) -> bool:
        if (now := self._now()) - self._asked >= PERIOD_S:
            self._asked = now
            found = self._read(self._device)
            self._slow = found is not None and is_slow(*found)
        return self._slow


def is_slow(mhz: int | None, highest: int | None) -> bool:
    """Whether power or heat holds the GPU's clock well below its highest."""
    return bool(mhz and highest and mhz < LEAST_CLOCK * highest)


def sm_clock(device: str) -> tuple[int, int] | None:
    """The SM clock now and its highest, in MHz; None where NVML cannot tell."""
    library, handle = _open(device)
    highest = highest_sm(device)
    if library is None or not highest:
        return None
    mhz = _ask(library.nvmlDeviceGetClockInfo, handle, SM)
    return (mhz, highest) if mhz else None


@cache
def highest_sm(device: str) -> int | None:
    """The SM's highest clock in MHz, which does not change."""
    library, handle = _open(device)
    return None if library is None else _ask(library.nvmlDeviceGetMaxClockInfo, handle, SM)


def driver(device: str) -> str | None:
    """The NVIDIA driver's version."""
    library, _ = _open(device)
    text = ctypes.create_string_buffer(96)
    if library is None or library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96)):
        return None
    return text.value.decode()


@cache
def _open(device: str) -> tuple[Any, ctypes.c_void_p]:
    """NVML and its handle of torch's `device`, found by UUID: CUDA_VISIBLE_DEVICES renumbers devices."""
    handle = ctypes.c_void_p()
    try:
        library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
    except (OSError, AttributeError, RuntimeError, AssertionError):
        return None, handle
    return (None if failed else library), handle


def _ask(function: Any, handle: ctypes.c_void_p, *which: int, kind: Any = ctypes.c_uint) -> int | None:
    answer = kind()
    return None if function(handle, *which, ctypes.byref(answer)) else int(answer.value)

"""The GPU's clocks, power and throttle reasons, read through NVML and never set."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from kcap.capture.nvml import MEMORY, SM, ask, highest_sm, opened, sm_clock
from kcap.schemas.measurement import Clocks

TEMPERATURE_GPU = 0  # nvmlTemperatureSensors_t
LEAST_CLOCK = 0.75  # of the highest SM clock
PERIOD_S = 0.005


def read(device: str) -> Clocks | None:
    """The state of the GPU `device` now; None where NVML cannot be asked."""
    library, handle = opened(device) if device.startswith("cuda") else (None, None)
    if library is None or handle is None:
        return None
    power = ask(library.nvmlDeviceGetPowerUsage, handle)
    return Clocks(
        sm_mhz=ask(library.nvmlDeviceGetClockInfo, handle, SM),
        sm_max_mhz=highest_sm(device),
        memory_mhz=ask(library.nvmlDeviceGetClockInfo, handle, MEMORY),
        power_w=None if power is None else power / 1e3,
        temperature_c=ask(library.nvmlDeviceGetTemperature, handle, TEMPERATURE_GPU),
        throttle_reasons=ask(library.nvmlDeviceGetCurrentClocksThrottleReasons, handle, kind=ctypes.c_ulonglong),
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


def driver(device: str) -> str | None:
    """The NVIDIA driver's version."""
    library, _ = opened(device)
    text = ctypes.create_string_buffer(96)
    if library is None or library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96)):
        return None
    return text.value.decode()

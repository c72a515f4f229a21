"""The machine, as measurements describe it: its names, and its GPU's clocks, which are read and never set.

Cool-downs between samples keep the GPU's power limit out of the times. An engine's kernels run in bursts at the full
clock. Matrix products repeated without a pause draw more power than the limit, and after some fifty milliseconds the
same kernel takes 15 % longer (seen on an H200). With a cool-down as long as the sample before it, the mean power stays
well below the limit; if the clock drops nevertheless, cool-downs grow.
"""

from __future__ import annotations

import ctypes
import platform
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from kcap.schemas.results.measurement import Clocks
from kcap.system.nvml import MEMORY, SM, ask, highest_sm, opened, sm_clock
from kcap.system.worker_process import Environment


def machine_fields(device: str, threads: int | None) -> Environment:
    """Device, driver, torch and threads, as Measurements name them; sets torch's device and threads."""
    if threads:
        torch.set_num_threads(threads)
    gpu = device.startswith("cuda")
    if gpu:
        torch.cuda.set_device(device)
    fields = gpu_fields(device) if gpu else host_fields()
    return {**fields, "torch": torch.__version__}


def gpu_fields(device: str) -> Environment:
    name = torch.cuda.get_device_name(device)
    return {"device": device, "device_name": name, "driver": driver_version(device), "threads": None}


def host_fields() -> Environment:
    """The fields of what the host's clock timed, on a machine with a GPU too."""
    return {"device": "cpu", "device_name": cpu_name(), "driver": None, "threads": torch.get_num_threads()}


@cache
def cpu_name() -> str:
    """The processor's name, as Linux has it."""
    try:
        match = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()


def choose_device(device: str | None, home: str | None) -> str:
    """The device to replay on: the one asked for, else the Recording's (`home`); ValueError says why there is none."""
    available = torch.cuda.is_available()
    chosen = device or home or ("cuda" if available else "cpu")
    if chosen.startswith("cuda") and not available:
        reason = "recorded on cuda, and " if device is None else ""
        raise ValueError(f"{reason}torch {torch.__version__} finds no CUDA GPU here: pass --device cpu")
    if chosen.startswith("cuda:") and int(chosen.removeprefix("cuda:")) >= torch.cuda.device_count():
        raise ValueError(f"{chosen}: this machine has {torch.cuda.device_count()} GPUs: pass --device cuda:0")
    return "cuda:0" if chosen == "cuda" else chosen


def device_of_rank(chosen: str, rank: int, size: int) -> str:
    """The device of a group's `rank`, where the group is replayed on devices as `chosen`: each has a GPU of its own,
    from the chosen one on.

    ValueError where there are too few.
    """
    if not chosen.startswith("cuda"):
        return chosen
    first, count = int(chosen.removeprefix("cuda:")), torch.cuda.device_count()
    if first + size > count:
        of_them = f", of which {count - first} from cuda:{first} on" if first else ""
        raise ValueError(f"its group has {size} ranks, and this machine {count} GPUs{of_them}")
    return f"cuda:{first + rank}"


TEMPERATURE_GPU = 0  # nvmlTemperatureSensors_t
SLOW_CLOCK = 0.75  # of the highest SM clock
WATCH_PERIOD_S = 0.005


def read_clocks(device: str) -> Clocks | None:
    """The clocks, power and temperature of the GPU `device` now; None without NVML."""
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


class ClockWatch:
    """Whether the SM clock is below three quarters of its highest; read at most every `WATCH_PERIOD_S` seconds.

    `read` returns the clock and its highest in MHz, or None.
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
        if (now := self._now()) - self._asked >= WATCH_PERIOD_S:
            self._asked = now
            clock_mhz = self._read(self._device)
            self._slow = clock_mhz is not None and is_slow_clock(*clock_mhz)
        return self._slow


def is_slow_clock(mhz: int | None, highest: int | None) -> bool:
    """Whether power or heat holds the GPU's clock well below its highest."""
    return bool(mhz and highest and mhz < SLOW_CLOCK * highest)


def driver_version(device: str) -> str | None:
    """The NVIDIA driver's version."""
    library, _ = opened(device)
    text = ctypes.create_string_buffer(96)
    if library is None or library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96)):
        return None
    return text.value.decode()


FULL_CLOCK = 0.97  # of the highest clock that was seen: below it, power or heat limits the GPU
MIN_FACTOR, MAX_FACTOR = 1.0, 16.0  # of a cool-down over the sample before it
MAX_COOL_DOWN_S = 0.5
_highest_clock: dict[str, int] = {}  # by device, the highest SM clock in this process


class CoolDown:
    """The pauses between the samples of one Call on `device`; they grow while the clock is below its highest.

    `read` returns the SM clock and its highest in MHz, or None.
    """

    def __init__(
        self,
        device: str,
        read: Callable[[str], tuple[int, int] | None] = sm_clock,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._device, self._read, self._now, self._sleep = device, read, now, sleep
        self._since: float | None = None
        self.factor = MIN_FACTOR

    def wait(self) -> None:
        """Pause before a sample, when the GPU's work has ended; not before the first."""
        if self._since is not None:
            worked = self._now() - self._since
            if self._is_throttled():
                self.factor = min(2 * self.factor, MAX_FACTOR)
            self._sleep(min(self.factor * worked, MAX_COOL_DOWN_S))
        self._since = self._now()

    def _is_throttled(self) -> bool:
        clock_mhz = self._read(self._device)
        if clock_mhz is None:
            return False
        _highest_clock[self._device] = max(clock_mhz[0], _highest_clock.get(self._device, 0))
        return clock_mhz[0] < FULL_CLOCK * _highest_clock[self._device]

"""What a measurement says of the machine, asked in the worker: its names, and its GPU's clocks, read and never set.

Rests keep the GPU's power limit out of what is timed. An engine's kernels run in bursts, at the full clock. Matrix
products repeated without a rest draw more than the limit allows, and after some fifty milliseconds the same kernel
takes 15 % longer (seen on an H200). With a rest as long as the sample before it the mean power stays well below the
limit; where the clock falls all the same, the rests grow.
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


def machine_fields(device: str, threads: int | None) -> dict[str, str | int | None]:
    """The fields of a Measurement that name device, driver, torch and threads; fixes device and threads."""
    if threads:
        torch.set_num_threads(threads)
    gpu = device.startswith("cuda")
    if gpu:
        torch.cuda.set_device(device)
    there = gpu_fields(device) if gpu else host_fields()
    return {**there, "torch": torch.__version__}


def gpu_fields(device: str) -> dict[str, str | int | None]:
    name = torch.cuda.get_device_name(device)
    return {"device": device, "device_name": name, "driver": driver_version(device), "threads": None}


def host_fields() -> dict[str, str | int | None]:
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


def choose_device(device: str | None, home: str | None) -> str:
    """The device to replay on: the one asked for, or the recording's (`home`); ValueError says why there is none."""
    available = torch.cuda.is_available()
    wanted = device or home or ("cuda" if available else "cpu")
    if wanted.startswith("cuda") and not available:
        where = "recorded on cuda, and " if device is None else ""
        raise ValueError(f"{where}torch {torch.__version__} finds no CUDA GPU here: pass --device cpu")
    if wanted.startswith("cuda:") and int(wanted.removeprefix("cuda:")) >= torch.cuda.device_count():
        raise ValueError(f"{wanted}: this machine has {torch.cuda.device_count()} GPUs: pass --device cuda:0")
    return "cuda:0" if wanted == "cuda" else wanted


TEMPERATURE_GPU = 0  # nvmlTemperatureSensors_t


SLOW_CLOCK = 0.75  # of the highest SM clock


WATCH_PERIOD_S = 0.005


def read_clocks(device: str) -> Clocks | None:
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


class ClockWatch:
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
        if (now := self._now()) - self._asked >= WATCH_PERIOD_S:
            self._asked = now
            found = self._read(self._device)
            self._slow = found is not None and is_slow_clock(*found)
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


HELD_CLOCK = 0.97  # of the highest clock that was seen: below it power or heat holds the GPU back


LEAST_REST, MOST_REST = 1.0, 16.0  # rests in times of the work before them


LONGEST_REST_S = 0.5


_highest_clock: dict[str, int] = {}  # by device, the highest SM clock in this process


class Pace:
    """The rests between the samples of one Call on `device`; they grow while the clock is held down.

    `read` gives the SM clock and its highest in MHz, or None.
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
        self.factor = LEAST_REST

    def rest(self) -> None:
        """Before a sample, when the GPU's work has ended: wait, unless it is the first."""
        if self._since is not None:
            worked = self._now() - self._since
            if self._held():
                self.factor = min(2 * self.factor, MOST_REST)
            self._sleep(min(self.factor * worked, LONGEST_REST_S))
        self._since = self._now()

    def _held(self) -> bool:
        found = self._read(self._device)
        if found is None:
            return False
        _highest_clock[self._device] = max(found[0], _highest_clock.get(self._device, 0))
        return found[0] < HELD_CLOCK * _highest_clock[self._device]

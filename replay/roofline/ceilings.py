"""A machine's ceilings: bandwidth by working set, arithmetic by dtype, measured once and kept in the user's cache.

They are kept by device, driver, torch and threads, and stated with results. Bandwidths are GB/s (1e9 bytes, read and
written both counted), arithmetic is TFLOP/s, sizes are bytes.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field, FiniteFloat, ValidationError

from kcap.errors import KcapError
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.records import Record
from kcap.system.native_build import cache_folder

TF32 = "tf32"  # float32 whose products are rounded to 10 bits of mantissa, as a GPU's matrix units take it
DTYPE_WIDTHS = {TF32: 32, "float4_e2m1": 4}
NARROWER_FACTOR = 4.0  # a dtype narrower than all that were measured may be so many times as fast as these


class BandwidthLevel(Record):
    """The best bandwidth measured over a working set of `size` bytes, or of a larger one."""

    size: int = Field(ge=0)
    gb_s: FiniteFloat = Field(gt=0)

    def line(self) -> bytes:
        raise TypeError("a Level is part of the Ceilings' line")


class Ceilings(Record):
    """The limits measured on one device, by so many `threads` of a CPU.

    `levels` ascend; the first, of 0 bytes, is the bandwidth that no working set exceeds. `cache_bytes`: the last-level
    cache. `empty_us`: microseconds of a kernel that does almost nothing, back to back.
    """

    device: str = "cpu"
    device_name: str = ""
    driver: str | None = None
    torch: str = ""
    threads: int | None = None
    levels: list[BandwidthLevel] = Field(min_length=1)
    tflop_s: dict[str, FiniteFloat] = {}
    cache_bytes: int = 0
    empty_us: FiniteFloat = 0.0

    @property
    def memory_gb_s(self) -> float:
        """The bandwidth of main memory: of the largest working set."""
        return self.levels[-1].gb_s

    def bandwidth(self, working_set: float) -> float:
        """GB/s that nothing beats over so many bytes, half of which may stay in a nearer cache meanwhile."""
        return self.at(working_set / 2)

    @property
    def top(self) -> float:
        return self.levels[0].gb_s

    def peak(self, dtype: str) -> float | None:
        """TFLOP/s that no product of matrices of `dtype` beats; None where nothing comparable was measured.

        A narrow dtype may be computed as a wider one, never the other way round.
        """
        if not self.tflop_s:
            return None
        width = dtype_width(dtype)
        if width < min(map(dtype_width, self.tflop_s)):
            return NARROWER_FACTOR * max(self.tflop_s.values())
        return max((rate for name, rate in self.tflop_s.items() if dtype_width(name) >= width), default=None)

    def raised(self, other: Ceilings) -> Ceilings:
        """The higher of both, where `other` was measured on the same device at another time."""
        sizes = {level.size for ceilings in (self, other) for level in ceilings.levels}
        levels = [(size, max(ceilings.at(size) for ceilings in (self, other))) for size in sorted(sizes)]
        rates = {
            name: max(self.tflop_s.get(name, 0.0), other.tflop_s.get(name, 0.0))
            for name in (*self.tflop_s, *other.tflop_s)
        }
        faster = min(self.empty_us, other.empty_us)
        return self.model_copy(update={"levels": descending_levels(levels), "tflop_s": rates, "empty_us": faster})

    def at(self, size: float) -> float:
        """The bandwidth measured over `size` bytes, or over the next smaller working set."""
        return next((level.gb_s for level in reversed(self.levels) if level.size <= size), self.top)


def dtype_width(dtype: str) -> int:
    """The bits of a number of `dtype`; of an unknown one those of the narrowest."""
    dtype_info = BY_NAME.get(dtype)
    return DTYPE_WIDTHS.get(dtype, dtype_info.bits if dtype_info else min(DTYPE_WIDTHS.values()))


def descending_levels(measured: list[tuple[int, float]]) -> list[BandwidthLevel]:
    """Levels of `measured` (size, GB/s), ascending in size: a small working set is as fast as any larger one."""
    levels: list[BandwidthLevel] = []
    best = 0.0
    for size, rate in sorted(measured, reverse=True):
        best = max(best, rate)
        levels.insert(0, BandwidthLevel(size=size, gb_s=best))
    return levels


CEILINGS_VERSION = 1  # of the method: a newer one measures again
KEY_FIELDS = ("device_name", "driver", "torch", "threads")
MEASURE_LIMIT_S = 300.0
MeasureCeilings = Callable[[Mapping[str, Any]], Ceilings]


def measure_in_process(environment: Mapping[str, Any]) -> Ceilings:
    """The ceilings of a Measurement's `device` and `threads`, in a process of its own; a few seconds.

    KcapError if that process fails.
    """
    threads = [str(environment["threads"])] if environment.get("threads") else []
    command = [sys.executable, "-P", "-m", "kcap.replay.roofline.measure", str(environment["device"]), *threads]
    try:
        done = subprocess.run(command, capture_output=True, timeout=MEASURE_LIMIT_S, check=False)
        return Ceilings.model_validate_json(done.stdout)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise KcapError(f"the ceilings of {environment['device']} cannot be measured: {error}") from None
    except ValidationError:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise KcapError(f"the ceilings of {environment['device']} cannot be measured: {lines[-1][:200]}") from None


def kept_ceilings(environment: Mapping[str, Any], measure: MeasureCeilings = measure_in_process) -> Ceilings:
    """The ceilings kept for `environment` (the fields of a Measurement that name the machine), else measured now."""
    return read_ceilings(environment) or write_ceilings(environment, measure(environment))


def raised_ceilings(environment: Mapping[str, Any], measure: MeasureCeilings = measure_in_process) -> Ceilings:
    """The ceilings, measured again and raised where they turn out higher: the machine may have been busy before."""
    measured, kept = measure(environment), read_ceilings(environment)
    return write_ceilings(environment, kept.raised(measured) if kept else measured)


def ceilings_path(environment: Mapping[str, Any]) -> Path:
    """Where the ceilings are kept. A home may be shared by machines: the host's name is part of it."""
    cpus = len(os.sched_getaffinity(0))
    key = [CEILINGS_VERSION, platform.node(), cpus, *(environment.get(name) for name in KEY_FIELDS)]
    return cache_folder() / "ceilings" / f"{sha256(orjson.dumps(key)).hexdigest()[:16]}.json"


def read_ceilings(environment: Mapping[str, Any]) -> Ceilings | None:
    """The ceilings kept for `environment`; None if there are none, or none that can be read."""
    try:
        return Ceilings.model_validate_json(ceilings_path(environment).read_bytes())
    except (OSError, ValidationError):
        return None


def ceilings_of_device(device_name: str | None) -> Ceilings | None:
    """The newest ceilings kept on this machine for a device of this name; None if there are none."""
    files = sorted((cache_folder() / "ceilings").glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files:
        with suppress(OSError, ValidationError):
            ceilings = Ceilings.model_validate_json(path.read_bytes())
            if ceilings.device_name == device_name:
                return ceilings
    return None


def write_ceilings(environment: Mapping[str, Any], ceilings: Ceilings) -> Ceilings:
    """Write `ceilings` atomically; if the cache cannot be written, they are measured again next time."""
    path = ceilings_path(environment)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(ceilings.line())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
    return ceilings

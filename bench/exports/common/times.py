"""Measured times by Call, from the file that `kcap replay -o` writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from kcap.bench.contents import Contents
from kcap.errors import CallError
from kcap.schemas import measurement
from kcap.schemas.measurement import Measurement
from kcap.schemas.signature import call_key


@dataclass(frozen=True)
class Times:
    """A Call's time: the mean over its Samples' medians. `relative`: over the time of a kernel that does next to
    nothing, by the same method, on a GPU only. `failed`: why no Sample could run."""

    runtime_us: float | None
    relative: float | None
    failed: str | None


def read_times(path: Path, contents: Contents) -> dict[str, Times]:
    """Times by `call_key`; CallError if none in `path` is of a Call in `contents`."""
    found: dict[str, list[Measurement]] = {}
    for one in measurement.read(path):
        found.setdefault(one.key, []).append(one)
    if not any(call_key(call) in found for call in contents.kernels):
        raise CallError(f"{path}: measures no call of {contents.path} (kcap replay {contents.path} -o {path})")
    return {key: _times(several) for key, several in found.items()}


def _times(several: Iterable[Measurement]) -> Times:
    timed = [one for one in several if one.status == "ok" and one.median_us is not None]
    failed = next((one.reason or "failed" for one in several if one.status == "failed"), None)
    if not timed:
        return Times(None, None, failed)
    runtime = fmean(one.median_us or 0.0 for one in timed)
    floors = [one.floor_us for one in timed if one.floor_us and one.device.startswith("cuda")]
    return Times(runtime, runtime / fmean(floors) if floors else None, None)

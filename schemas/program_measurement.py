"""The measurement of a Program: one JSON line for each step or captured graph that was replayed as a whole.

Its time is that of one run, from its first kernel's start to its last one's end, gaps included; its kernels' durations
come from a pass of their own. These are two clocks: compare the first with a step's wall time, the second with
durations.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from kcap.schemas.jsonfile import read_lines
from kcap.schemas.measurement import Cache, Clocks, KernelDuration, Method, Status, StopRule, Time
from kcap.schemas.recording import GraphUse, Phase, Record

# of a Call in a Program; host: the host's work, which no GPU time holds
Part = Literal["ok", "host", "skipped", "failed"]


class ProgramCall(Record):
    """One distinct Call of a Program. `count`: its invocations in it, over which its weights and caches are `sets`.

    `us`: the mean of one invocation, its kernels' durations summed (on a CPU: the host's time of it, the dispatch
    included); None where it is not known. `kernels` are those of one invocation.
    """

    call: int = Field(ge=0)
    operator: str = Field(min_length=1)
    sample: int | None = None
    count: int = Field(ge=1)
    sets: int = Field(default=0, ge=0)
    status: Part = "ok"
    reason: str | None = None
    us: Time | None = None
    kernels: list[KernelDuration] = []

    def line(self) -> bytes:
        raise TypeError("a ProgramCall is part of a ProgramMeasurement's line")


class ProgramMeasurement(Record):
    """What a Program took as a whole. `count`: how often it ran in `phase`. `invocations`: of kernels, views left out.

    `stretches`: how many CUDA graphs it took; 1 and `method` graph: the whole is one. `step`: the recorded step that
    was asked for, or whose Samples it takes.
    """

    program: int = Field(ge=0)
    kind: Literal["step", "graph"] = "step"
    phase: Phase = "other"
    mode: GraphUse = "eager"
    padded: int | None = None
    step: int | None = None
    count: int = Field(default=0, ge=0)
    invocations: int = Field(default=0, ge=0)
    replayed: int = Field(default=0, ge=0)  # of these, what the time holds
    calls: list[ProgramCall] = []
    status: Status = "ok"
    reason: str | None = None
    median_us: Time | None = None
    q1_us: Time | None = None
    q3_us: Time | None = None
    samples_us: list[Time] = []
    slow_samples: list[int] = []
    kernel_us: Time | None = None  # of one run: every kernel's duration
    unmatched_us: Time | None = None  # of these, what could be given to no Call
    n: int = Field(default=0, ge=0)  # runs in one sample of the clock
    stop: StopRule | None = None
    method: Method | None = None
    cache: Cache | None = None
    stretches: int = Field(default=0, ge=0)
    bytes: int | None = None  # of all inputs
    notes: list[str] = []
    device: str = "cpu"
    device_name: str = ""
    clocks_before: Clocks | None = None
    clocks: Clocks | None = None
    driver: str | None = None
    torch: str = ""
    threads: int | None = None

    @property
    def left_out(self) -> int:
        """Invocations of kernels that could not be rebuilt, or failed; the host's work is not among them."""
        return sum(call.count for call in self.calls if call.status in ("skipped", "failed"))

    @property
    def partial(self) -> bool:
        """Whether its time lacks a kernel that the engine ran."""
        return self.left_out > 0


def read(path: Path) -> Iterator[ProgramMeasurement]:
    """The measurements in `path`; FormatError names the line that is none."""
    return read_lines(path, ProgramMeasurement)

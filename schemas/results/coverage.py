"""The coverage of a Recording: how much GPU time of a few profiled steps is of recorded Calls.

    coverage.jsonl   one profiled step a line, with every kernel, copy and memset that it launched

The profiled steps are not the counted ones. In pandas, a row for each kernel:

    lines = [json.loads(line) for line in open("llama.kcap/coverage.jsonl")]
    pandas.json_normalize(lines, "kernels", ["index", "mode", "phase"], errors="ignore")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field, FiniteFloat

from kcap.errors import FormatError
from kcap.schemas.files.jsonfile import read_lines
from kcap.schemas.recording.recording import GraphUse, Phase, Record

FILE = "coverage.jsonl"
Time = Annotated[FiniteFloat, Field(ge=0)]


class KernelTime(Record):
    """One kernel, copy or memset that ran on the GPU: its whole name, and the Call (by id) that launched it.

    `reason` says why there is no Call; `graph`: a replayed CUDA graph ran it. `start_us`: when it started after the
    step's first kernel had; `launched_us`: when the host launched it, by the same clock: its call began, or that which
    launched its graph returned (before format 1.5: began). Both are None where the Recording was made before format
    1.3, the second also where the launch is not known.
    """

    name: str
    us: Time
    call: int | None = None
    reason: str | None = None
    graph: bool = False
    start_us: Time | None = None
    launched_us: FiniteFloat | None = None

    def line(self) -> bytes:
        raise TypeError("a KernelTime is part of a StepCoverage's line")


class Disagreement(Record):
    """An operator that ran more or less often by the profiler than by the recorder, which missed or invented calls."""

    operator: str
    profiled: int = 0
    recorded: int = 0

    def line(self) -> bytes:
        raise TypeError("a Disagreement is part of a StepCoverage's line")


class StepCoverage(Record):
    """A profiled step: what it was (as in Step), and its kernels in the order in which they started.

    `gpu_us` sums the kernels' times (those that overlap count each), `explained_us` that of kernels with a Call.
    `sm_mhz`: the clock of the GPU's multiprocessors as the step's work ended, since format 1.5; None where it is not
    known.
    """

    index: int = Field(ge=0)
    rank: int = 0
    phase: Phase
    tokens: int = 0
    sequences: int = 0
    lengths: list[int] = []
    queries: list[int] = []
    mode: GraphUse = "eager"
    padded: int | None = None
    program: int | None = None  # id in programs.jsonl
    gpu_us: Time = 0.0
    explained_us: Time = 0.0
    sm_mhz: int | None = Field(default=None, ge=0)
    kernels: list[KernelTime] = []
    disagreements: list[Disagreement] = []


class Share(Record):
    """GPU time, and how much of it is of recorded Calls; `share` None: no GPU time."""

    steps: int = 0
    kernels: int = 0
    gpu_us: Time = 0.0
    explained_us: Time = 0.0
    share: Time | None = None

    def line(self) -> bytes:
        raise TypeError("a Share is part of recording.json")


class Unexplained(Record):
    """All kernels of one name that have no Call for one reason."""

    name: str
    reason: str
    count: int = 0
    us: Time = 0.0

    def line(self) -> bytes:
        raise TypeError("an Unexplained is part of recording.json")


class CoverageSummary(Share):
    """What recording.json says of coverage.jsonl; what took the longest comes first."""

    by_mode: dict[str, Share] = {}
    unexplained: list[Unexplained] = []
    disagreements: list[Disagreement] = []  # summed over steps
    disagreeing_steps: int = 0


def write(path: Path, steps: Iterable[StepCoverage]) -> None:
    """Write `steps` to `path`, one JSON object a line."""
    with path.open("wb") as file:
        file.writelines(step.line() for step in steps)


def read(path: Path) -> Iterator[StepCoverage]:
    """The steps in `path`; FormatError names the line that is none."""
    if not path.is_file():
        raise FormatError(str(path), "missing: record with --check-coverage to have it")
    yield from read_lines(path, StepCoverage)

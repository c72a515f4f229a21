"""The judge's results, one JSON object a line: Solutions on Workloads, and references compared with recorded operators.

Times are microseconds of one invocation. Fields and statuses that the exported formats lack are here.

A reference is checked on each Call of its Definition, one line each. A Definition is `status:verified` if every line
that is not `skipped` says `agrees`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, FiniteFloat

from kcap.schemas.files.jsonfile import read_lines
from kcap.schemas.flashinfer.trace import ErrorField
from kcap.schemas.recording.records import Record
from kcap.schemas.results.measurement import Cache, Clocks, Method, StopRule, Time

Status = Literal[
    "PASSED",
    "INCORRECT_SHAPE",
    "INCORRECT_DTYPE",
    "INCORRECT_NUMERICAL",
    "RUNTIME_ERROR",
    "COMPILE_ERROR",
    "TIMEOUT",
    "REWARD_HACK",  # it did what earns a score that it does not deserve, meant or not
    "NOT_JUDGED",  # the Definition, the Workload or the device is at fault, not the Solution
]

STATUSES: tuple[Status, ...] = get_args(Status)


class Accuracy(Record):
    """The largest errors over all outputs that were compared, of which `compared` were those of timed invocations.

    `error` is in units of what is allowed: 1 and below passes. `allowed` says in words what that is, `truth` what the
    outputs were compared with (`reference in float64`).
    """

    error: ErrorField = 0.0
    max_absolute_error: ErrorField = 0.0
    max_relative_error: ErrorField = 0.0
    compared: int = 0
    allowed: str = ""
    truth: str = ""

    def line(self) -> bytes:
        raise TypeError("an Accuracy is part of an Outcome's line")


class WrongAxis(Record):
    """An axis of an output, by name where one is known, and where on it elements are wrong.

    `positions`: at how many of its `size` positions, between `first` and `last`. `tile`: the length of tiles (a power
    of two) that are each wrong or right from end to end.
    """

    axis: str = ""
    size: int = Field(ge=1)
    first: int = Field(ge=0)
    last: int = Field(ge=0)
    positions: int = Field(ge=1)
    tile: int | None = None

    def line(self) -> bytes:
        raise TypeError("a WrongAxis is part of an Outcome's line")


class WrongElements(Record):
    """What of one output was wrong in one invocation: the worst element, how many are wrong, and where.

    The worst is at `index`: it may differ from `expected` by `tolerance`. A number that JSON lacks is text: `nan`,
    `inf`. `wrong` is 0 where only all elements together are too far off. `where` says in words what `axes` does.
    """

    output: str
    index: list[int] = []
    expected: int | FiniteFloat | str
    found: int | FiniteFloat | str
    tolerance: FiniteFloat = 0.0
    wrong: int = Field(ge=0)
    total: int = Field(ge=0)
    not_a_number: int = 0
    axes: list[WrongAxis] = []
    where: str = ""

    def line(self) -> bytes:
        raise TypeError("WrongElements are part of an Outcome's line")


class Clocked(Record):
    """Times by one clock: every sample of it, each the mean of `n` invocations.

    `way_us`: how much of an invocation's time is the way to its process and back, which is in it; of the judge alone.
    """

    median_us: Time
    q1_us: Time
    q3_us: Time
    samples_us: list[Time] = []
    n: int = 1
    stop: StopRule | None = None
    method: Method | None = None
    cache: Cache | None = None
    way_us: Time | None = None

    def line(self) -> bytes:
        raise TypeError("a Clocked is part of an Outcome's line")


class Outcome(Record):
    """One Solution on one Workload.

    `reason`: why it did not pass, in a line. `log`: the end of what it printed. `floor_us`: what the machine cannot go
    below for the Workload's bytes and FLOPs. `count`: how often the engine ran the Workload; None where not known.
    `wrong`: of the outputs of the first invocation that was wrong, those that were.
    """

    solution: str
    author: str = ""
    definition: str
    workload: str
    file: str = ""
    status: Status
    reason: str | None = None
    log: str = ""
    accuracy: Accuracy | None = None
    wrong: list[WrongElements] = []
    time: Clocked | None = None
    reference: Clocked | None = None
    floor_us: Time | None = None
    count: int | None = None
    notes: list[str] = []
    confined: list[str] = []  # what kept the Solution's process in its place
    seconds: FiniteFloat = 0.0  # that judging took
    timestamp: str = ""
    device: str = "cpu"
    device_name: str = ""
    clocks: Clocks | None = None
    driver: str | None = None
    torch: str = ""
    threads: int | None = None

    @property
    def speedup(self) -> float | None:
        """The reference's median over the Solution's; None unless it passed."""
        if self.status != "PASSED" or self.time is None or self.reference is None or not self.time.median_us:
            return None
        return self.reference.median_us / self.time.median_us


def write_outcomes(path: Path, outcomes: Iterable[Outcome]) -> None:
    """Write `outcomes` to `path`, one JSON object a line."""
    with path.open("wb") as file:
        file.writelines(outcome.line() for outcome in outcomes)


def read_outcomes(path: Path) -> Iterator[Outcome]:
    """The Outcomes in `path`; FormatError names the line that is none."""
    return read_lines(path, Outcome)


REFERENCE_CHECKS_FILE = "checks.jsonl"


class ReferenceCheck(Record):
    """The operator of one Call against its Definition's reference, on the same rebuilt inputs.

    `error`: the greatest, in units of what is allowed for the dtype (1 and below: the same).
    """

    definition: str
    operator: str
    call: int
    status: Literal["agrees", "differs", "skipped", "failed"]
    reason: str | None = None
    error: float | None = None


def read_reference_checks(path: Path) -> Iterator[ReferenceCheck]:
    """The checks in `path`; FormatError names the line that is none."""
    return read_lines(path, ReferenceCheck)


def write_reference_checks(path: Path, checks: Iterable[ReferenceCheck]) -> None:
    with path.open("wb") as file:
        file.writelines(check.line() for check in checks)

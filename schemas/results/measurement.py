"""The measurements of replay, one JSON object a line: of a Call on a Sample, of a Workload, or of a whole Program.

Times are microseconds of one invocation; every sample of the clock is kept.

A Program's time is that of one run, from its first kernel's start to its last one's end, gaps included; the durations
of its kernels come from a pass of their own. These are two clocks: compare the first with a step's wall time, the
second with durations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, model_validator

from kcap.schemas.files.jsonfile import read_lines
from kcap.schemas.recording.recording import Argument, GraphUse, Phase, Record

Status = Literal["ok", "skipped", "failed"]

# CUDA graph replays, CUDA event pairs, the host's clock (no GPU time); none: the GPU was given nothing to do.
Method = Literal["graph", "events", "host", "none"]

# What the caches hold of the inputs. cold: none of them; warm: all that fits; serving: as in a step of many layers, no
# weight and no key-value cache, but the activations, unless they take more than a quarter of the L2.
Cache = Literal["cold", "warm", "serving"]
CACHES: tuple[Cache, ...] = ("cold", "warm", "serving")

# The median's error fell below the bound; the noise no longer changes, and more samples would say nothing new; the time
# was up.
StopRule = Literal["converged", "stable", "limit"]
NOTHING = "nothing was launched"  # a note, as those below
AT_FLOOR = "within twice the floor, the time of a kernel that does next to nothing"
SLOWED = "the SM clock was below three quarters of its highest"
DROPPED = "samples are not in the median: meanwhile " + SLOWED  # after their number
MADE_UP = "made up for want of"  # a file of the dataset, which the note names
DISTURBED = "other processes took the CPU during more than a quarter of the samples"
Time = Annotated[FiniteFloat, Field(ge=0)]


class Clocks(Record):
    """The GPU's state right before or after the timed work, read and never set."""

    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    memory_mhz: int | None = None
    power_w: FiniteFloat | None = None
    temperature_c: int | None = None
    throttle_reasons: int | None = None  # NVML's bit mask; 0 and 1 (idle) mean none

    def line(self) -> bytes:
        raise TypeError("Clocks are part of a Measurement's line")


class KernelDuration(Record):
    """A kernel, copy or memset as the profiler saw it: median microseconds of one, and how many an invocation has."""

    name: str = Field(min_length=1)
    us: Time
    count: Annotated[FiniteFloat, Field(gt=0)] = 1.0  # no whole number where invocations differ

    def line(self) -> bytes:
        raise TypeError("a KernelDuration is part of a Measurement's line")


class LeastWork(Record):
    """What one invocation must do at least: bytes read and written (`moved`), `read` of them, and `flops` in `dtype`.

    `fresh`: what of `read` is of inputs that rotate: the cache does not hold it, unless it is `warm`.
    """

    moved: int = Field(default=0, ge=0)
    read: int = Field(default=0, ge=0)
    fresh: int = Field(default=0, ge=0)
    flops: int = Field(default=0, ge=0)
    dtype: str = ""

    def line(self) -> bytes:
        raise TypeError("a LeastWork is part of a Measurement's line")


class Roofline(Record):
    """`us`: what this machine cannot go below for that work; `times`: the median over it; what was achieved."""

    us: Time
    times: FiniteFloat = Field(ge=0)
    gb_s: FiniteFloat = Field(ge=0)
    tflop_s: FiniteFloat = Field(ge=0)

    def line(self) -> bytes:
        raise TypeError("a Roofline is part of a Measurement's line")


class Measurement(Record):
    """What one Call took on one Sample, where, and how that was measured; `reason` says why not.

    Of a dataset: what a Definition's reference took on the Workload with this uuid; `operator` is the Definition.
    """

    call: int | None = Field(default=None, ge=0)
    key: str = ""  # kcap.schemas.recording.signature.call_key: the same in any Recording
    operator: str = Field(min_length=1)
    definition: str | None = None
    workload: str | None = None
    args: list[Argument] = []
    sample: int | None = None  # line of samples.jsonl, from 0; None where the Call needs no Sample
    phases: list[Phase] = []  # the phases of the Samples that this one stands for; none: all
    count: int = Field(default=0, ge=0)  # how often the engine ran the Call in the phases replayed
    counts: dict[Phase, Annotated[int, Field(ge=0)]] = {}  # the same by phase; none: of a Workload, or not known
    status: Status = "ok"
    reason: str | None = None
    median_us: Time | None = None
    q1_us: Time | None = None
    q3_us: Time | None = None
    samples_us: list[Time] = []
    slow_samples: list[Annotated[int, Field(ge=0)]] = []  # places in samples_us: kept, but not in median and quartiles
    kernels: list[KernelDuration] = []  # of one invocation, from a pass of its own; another clock than the median's
    kernel_us: Time | None = None  # their sum
    floor_us: Time | None = None  # a kernel of one element, by the same method
    n: int = Field(default=0, ge=0)  # invocations in one sample of the clock
    stop: StopRule | None = None
    method: Method | None = None
    cache: Cache | None = None
    input_sets: int | None = None  # sets of inputs at places of their own, used in turns
    bytes: int | None = None  # of one set
    touched: int | None = None  # of these, what one invocation can reach: a lookup reads rows of its table
    work: LeastWork | None = None  # None: nobody knows
    roofline: Roofline | None = None
    ranks: int | None = Field(default=None, ge=1)  # of a collective: the processes that replayed it together
    waited_us: Time | None = None  # in one sample, before the last rank arrived: the mean over ranks; not in the times
    notes: list[str] = []
    dtype: str | None = None
    device: str = "cpu"
    device_name: str = ""
    clocks_before: Clocks | None = None
    clocks: Clocks | None = None
    driver: str | None = None
    torch: str = ""
    threads: int | None = None  # of torch's CPU pool; None on a GPU

    @model_validator(mode="after")
    def _names_a_call_or_a_workload(self) -> Measurement:
        if (self.call is None) is (self.workload is None) or (self.definition is None) is not (self.workload is None):
            raise ValueError("it is of a call, or of a definition and a workload")
        return self


def write_measurements(path: Path, measurements: Iterable[Measurement]) -> None:
    """Write `measurements` to `path`, one JSON object a line."""
    with path.open("wb") as file:
        file.writelines(measurement.line() for measurement in measurements)


def read_measurements(path: Path) -> Iterator[Measurement]:
    """The measurements in `path`; FormatError names the line that is none."""
    return read_lines(path, Measurement)


def on_the_device(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Those of the GPU's time, where there are any: host-side operators are not part of it."""
    on_gpu = [line for line in measurements if line.method in ("graph", "events")]
    return [line for line in measurements if line.method not in ("host", "none")] if on_gpu else list(measurements)


def of_phase(measurements: Sequence[Measurement], phase: str) -> Sequence[Measurement]:
    """A Call's lines that stand for `phase`: its Samples' own, or all if it has none; none if it was not replayed."""
    if any(line.counts and phase not in line.counts for line in measurements):
        return []
    return [line for line in measurements if not line.phases or phase in line.phases] or measurements


def mean_us(measurements: Sequence[Measurement], phase: str) -> float | None:
    """The mean time of one invocation in `phase`; None where no Sample that stands for it was timed."""
    medians = [line.median_us for line in of_phase(measurements, phase) if line.median_us is not None]
    return fmean(medians) if medians else None


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
    ranks: int | None = Field(default=None, ge=1)  # the processes that ran it together, each in the place of one rank
    waited_us: Time | None = None  # of one run, for others in collectives: the mean over ranks; part of the median
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


def read_program_measurements(path: Path) -> Iterator[ProgramMeasurement]:
    """The measurements in `path`; FormatError names the line that is none."""
    return read_lines(path, ProgramMeasurement)

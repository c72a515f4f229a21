"""The engine's side: the profiled steps of a Recording by kind, with the GPU time of every Call in them.

A step's span is from its first kernel to the end of its last, and some of that the GPU lay idle for want of work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median

from kcap.errors import CallError
from kcap.schemas.recording.recording import GraphUse, Phase, Recording
from kcap.schemas.results import coverage
from kcap.schemas.results.coverage import KernelTime, StepCoverage


@dataclass(frozen=True)
class StepKind:
    """What makes two steps run alike."""

    phase: Phase
    tokens: int
    sequences: int
    mode: GraphUse
    padded: int | None = None

    def __str__(self) -> str:
        graphs = self.mode if self.mode == "eager" else f"{self.mode} graphs"
        size = f"{_counted_word(self.tokens, 'token')} of {_counted_word(self.sequences, 'sequence')}"
        return f"{self.phase}, {size}, {graphs}" + (f" padded to {self.padded:,}" if self.padded else "")


def _counted_word(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


@dataclass
class GpuTime:
    """Kernels put together: microseconds, how many they are, and their names."""

    us: float = 0.0
    kernels: int = 0
    names: set[str] = field(default_factory=set)

    def add(self, kernel: KernelTime) -> None:
        self.us += kernel.us
        self.kernels += 1
        self.names.add(kernel.name)


@dataclass(frozen=True)
class KindSteps:
    """The profiled steps of one kind. `invocations`: how often each Call (by id) ran in all of them."""

    kind: StepKind
    steps: Sequence[StepCoverage]
    invocations: Counter[int]

    @cached_property
    def gpu_us(self) -> float:
        """Of all steps."""
        return sum(kernel.us for step in self.steps for kernel in step.kernels)

    @cached_property
    def by_call(self) -> dict[int, GpuTime]:
        """The GPU time of each Call, over all steps."""
        found: dict[int, GpuTime] = {}
        for kernel in self._kernels():
            if kernel.call is not None:
                found.setdefault(kernel.call, GpuTime()).add(kernel)
        return found

    @cached_property
    def of_no_call(self) -> dict[tuple[str, str], GpuTime]:
        """The GPU time of kernels that have no Call, by name and reason."""
        found: dict[tuple[str, str], GpuTime] = {}
        for kernel in self._kernels():
            if kernel.call is None:
                found.setdefault((kernel.name, kernel.reason or ""), GpuTime()).add(kernel)
        return found

    @cached_property
    def span(self) -> Span | None:
        """The mean over the steps; None where one of them has none."""
        gap = median_gap(self.steps)
        spans = [found for step in self.steps if (found := span_of_step(step, gap)) is not None]
        if len(spans) < len(self.steps):
            return None
        return Span(fmean(one.us for one in spans), fmean(one.waits_us for one in spans), gap)

    @property
    def sm_mhz(self) -> float | None:
        """The mean of the steps' SM clocks; None where none is known."""
        known = [step.sm_mhz for step in self.steps if step.sm_mhz]
        return fmean(known) if known else None

    @property
    def program(self) -> int | None:
        """The Program that most of the steps ran."""
        ran = Counter(step.program for step in self.steps if step.program is not None)
        return max(ran, key=lambda number: ran[number], default=None)

    def _kernels(self) -> Iterable[KernelTime]:
        return (kernel for step in self.steps for kernel in step.kernels)


def profiled_kinds(recording: Recording) -> list[KindSteps]:
    """The profiled steps by kind, most GPU time first.

    FormatError if there are none in the Recording, CallError if the profiler saw no GPU in them.
    """
    groups: dict[StepKind, list[StepCoverage]] = {}
    for step in coverage.read(recording.path / coverage.FILE):
        groups.setdefault(step_kind(step), []).append(step)
    kinds = [KindSteps(kind, steps, invocations_in(recording, steps)) for kind, steps in groups.items()]
    busy = [each for each in kinds if each.gpu_us > 0]
    if not busy:
        raise CallError(f"{recording.path}: its profiled steps used no GPU: record with --check-coverage on a GPU")
    return sorted(busy, key=lambda each: -each.gpu_us)


def step_kind(step: StepCoverage) -> StepKind:
    return StepKind(step.phase, step.tokens, step.sequences, step.mode, step.padded)


def invocations_in(recording: Recording, steps: Sequence[StepCoverage]) -> Counter[int]:
    """How often each kernel ran in `steps`, by their Programs; views and allocations only if the GPU worked for one."""
    worked = {kernel.call for step in steps for kernel in step.kernels}
    ran = Counter(step.program for step in steps)
    found: Counter[int] = Counter()
    for number, times in ran.items():
        if number is not None:
            for call in recording.ran(recording.program(number)):
                found[call.id] += times * (call.kind == "kernel" and (call.work or call.id in worked))
    return +found


# What is launched later than this before the GPU runs dry starts late: on an idle H200 a kernel started 8 to 20 µs
# after the host's call, under the profiler.
LAUNCH_US = 10.0


# What a GPU takes between two kernels whatever the host does, where too few of a kind's own gaps tell: "about a
# microsecond" between the nodes of a graph (README); on an H200 1.0 to 1.8 between kernels of a stream, profiled.
GAP_US = 1.0


FEWEST_GAPS = 10  # gaps of which the median says anything


_EndedKernel = tuple[KernelTime, float, float]  # a kernel, its start, and when all up to it have ended


@dataclass(frozen=True)
class Span:
    """`us`: first start to last end. `waits_us`: of it, what the GPU waited for the host to launch.

    A wait is what a gap has beyond `gap_us`, which the GPU takes in any case.
    """

    us: float
    waits_us: float
    gap_us: float = GAP_US

    @property
    def own_us(self) -> float:
        """What the GPU took by itself."""
        return self.us - self.waits_us


@dataclass(frozen=True)
class _Gap:
    """Before `kernel`: `us` from when the GPU ran `dry` to its start; negative where it started before that."""

    kernel: KernelTime
    dry: float
    us: float

    @property
    def late(self) -> bool:
        """Whether the host asked for the kernel when the GPU was dry already, or about to be."""
        launched = self.kernel.launched_us
        return launched is not None and launched > self.dry - LAUNCH_US

    @property
    def plain(self) -> bool:
        """Whether the GPU alone made it, between two kernels of a stream."""
        return self.us > 0 and not self.late and not self.kernel.graph and self.kernel.launched_us is not None


def span_of_step(step: StepCoverage, gap_us: float = GAP_US) -> Span | None:
    """A step's span; None where it ran nothing, or its Recording has no starts (made before format 1.3).

    `gap_us`: what the GPU takes between two kernels, as `own_gap` finds it.
    """
    ended = _kernels_with_ends(step)
    if not ended:
        return None
    waits = sum(max(gap.us - gap_us, 0.0) for gap in _gaps(ended) if gap.late)
    return Span(ended[-1][2] - ended[0][1], waits, gap_us)


def median_gap(steps: Sequence[StepCoverage]) -> float:
    """Microseconds that the GPU takes between two kernels of a stream: the median where the host was not late.

    Not of graphs, whose nodes follow closer than what the host launches; nor of kernels that start before the one
    before them has ended. GAP_US where fewer than ten are left.
    """
    known = [gap.us for step in steps for gap in _gaps(_kernels_with_ends(step)) if gap.plain]
    return median(known) if len(known) >= FEWEST_GAPS else GAP_US


def _kernels_with_ends(step: StepCoverage) -> list[_EndedKernel]:
    """Each kernel; nothing where a start is not known."""
    ended: list[_EndedKernel] = []
    for kernel in step.kernels:
        if kernel.start_us is None:
            return []
        end = kernel.start_us + kernel.us
        ended.append((kernel, kernel.start_us, max(end, ended[-1][2]) if ended else end))
    return ended


def _gaps(ended: list[_EndedKernel]) -> Iterator[_Gap]:
    for (_, _, dry), (kernel, start, _) in pairwise(ended):
        yield _Gap(kernel, dry, start - dry)

"""The engine's side: the profiled steps of a Recording by kind, with the GPU time of every Call in them.

A step's span is from the start of its first kernel to the end of its last; for some of it the GPU waits for work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median

from kcap.errors import CallError
from kcap.replay.group.transfers import transfer_of, usual_transfer
from kcap.schemas.recording.recording import GraphUse, Phase, Recording
from kcap.schemas.results import coverage
from kcap.schemas.results.coverage import KernelTime, StepCoverage


@dataclass(frozen=True)
class StepKind:
    """Steps of the same kind run the same work."""

    phase: Phase
    tokens: int
    sequences: int
    mode: GraphUse
    padded: int | None = None

    def __str__(self) -> str:
        graphs = self.mode if self.mode == "eager" else f"{self.mode} graphs"
        size = f"{_counted_word(self.tokens, 'token')} of {_counted_word(self.sequences, 'sequence')}"
        return f"{self.phase}, {size}, {graphs}" + (f" padded to {self.padded:,}" if self.padded else "")


def _counted_word(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


@dataclass
class GpuTime:
    """The sum of some kernels: microseconds, their number and their names.

    `shared_us`: of `us`, while a kernel of another Call ran, too; each of them is slower then.
    """

    us: float = 0.0
    shared_us: float = 0.0
    kernels: int = 0
    names: set[str] = field(default_factory=set)

    def add(self, kernel: KernelTime, shared_us: float = 0.0, waited_us: float = 0.0) -> None:
        self.us += kernel.us - waited_us
        self.shared_us += shared_us
        self.kernels += 1
        self.names.add(kernel.name)


@dataclass(frozen=True)
class KindSteps:
    """The profiled steps of one kind. `invocations`: of each Call (by id) in all of them.

    `waits`: of each step, by the number of the kernel, the microseconds that it waited for other ranks.
    """

    kind: StepKind
    steps: Sequence[StepCoverage]
    invocations: Counter[int]
    waits: Sequence[Mapping[int, float]] = ()

    @cached_property
    def gpu_us(self) -> float:
        """The GPU time of all steps, without the waits for other ranks."""
        return sum(kernel.us for step in self.steps for kernel in step.kernels) - self.waited_us

    @property
    def waited_us(self) -> float:
        """What the kernels of all steps waited for other ranks."""
        return sum(us for waits in self.waits for us in waits.values())

    @cached_property
    def by_call(self) -> dict[int, GpuTime]:
        """The GPU time of each Call, over all steps."""
        by_call: dict[int, GpuTime] = {}
        for number, step in enumerate(self.steps):
            waits = self.waits[number] if self.waits else {}
            for index, (kernel, shared_us) in enumerate(shared_times(step)):
                if kernel.call is not None:
                    time = by_call.setdefault(kernel.call, GpuTime())
                    time.add(kernel, shared_us, waits.get(index, 0.0))
        return by_call

    @cached_property
    def overlap_us(self) -> float:
        """By how much `gpu_us` exceeds the time in which any kernel ran."""
        return sum(overlap_of_step(step) for step in self.steps)

    @cached_property
    def of_no_call(self) -> dict[tuple[str, str], GpuTime]:
        """The GPU time of kernels that have no Call, by name and reason."""
        by_name: dict[tuple[str, str], GpuTime] = {}
        for kernel in self._kernels():
            if kernel.call is None:
                by_name.setdefault((kernel.name, kernel.reason or ""), GpuTime()).add(kernel)
        return by_name

    @cached_property
    def span(self) -> Span | None:
        """The mean over the steps; None if one of them has no span."""
        gap = median_gap(self.steps)
        spans = [span for step in self.steps if (span := span_of_step(step, gap)) is not None]
        if len(spans) < len(self.steps):
            return None
        waited_us = self.waited_us / len(self.steps)
        return Span(fmean(span.us for span in spans), fmean(span.waits_us for span in spans), gap, waited_us)

    @property
    def sm_mhz(self) -> float | None:
        """The mean of the steps' SM clocks; None if none is known."""
        clocks = [step.sm_mhz for step in self.steps if step.sm_mhz]
        return fmean(clocks) if clocks else None

    @property
    def program(self) -> int | None:
        """The Program that most of the steps ran."""
        steps_by_program = Counter(step.program for step in self.steps if step.program is not None)
        return max(steps_by_program, key=lambda number: steps_by_program[number], default=None)

    def _kernels(self) -> Iterable[KernelTime]:
        return (kernel for step in self.steps for kernel in step.kernels)


def profiled_kinds(recording: Recording) -> list[KindSteps]:
    """The profiled steps by kind, most GPU time first.

    FormatError if there are none in the Recording, CallError if the profiler saw no GPU in them.
    """
    steps = list(coverage.read(recording.path / coverage.FILE))
    kinds: dict[StepKind, list[int]] = {}
    for number, step in enumerate(steps):
        kinds.setdefault(step_kind(step), []).append(number)
    waits = waits_for_peers(recording, steps)
    all_kinds = []
    for kind, numbers in kinds.items():
        of_kind = [steps[number] for number in numbers]
        all_kinds.append(
            KindSteps(kind, of_kind, invocations_in(recording, of_kind), [waits[number] for number in numbers])
        )
    busy = [kind for kind in all_kinds if kind.gpu_us > 0]
    if not busy:
        raise CallError(f"{recording.path}: its profiled steps used no GPU: record with --check-coverage on a GPU")
    return sorted(busy, key=lambda kind: -kind.gpu_us)


def waits_for_peers(recording: Recording, steps: Sequence[StepCoverage]) -> list[dict[int, float]]:
    """Of each step, by the number of the kernel, the microseconds that a collective's kernel waited for other ranks.

    The n-th kernel of a name and a group is one collective in all ranks of the group. Where one of them did not profile
    the step, or ran another number of them, nothing is told of a wait.
    """
    groups = {place.rank: place.groups for place in recording.metadata.ranks}
    calls = {call.id: call.group for call in recording.calls if call.group is not None and call.group.size > 1}
    runs: dict[tuple[object, ...], dict[int, tuple[int, list[int]]]] = defaultdict(dict)
    for number, step in enumerate(steps):
        for index, kernel in enumerate(step.kernels):
            if (group := calls.get(-1 if kernel.call is None else kernel.call)) is not None:
                ranks = tuple(groups.get(step.rank, {}).get(group.name, sorted(groups)))
                key = (step.index, step_kind(step), ranks, group.size, group.name, kernel.name)
                runs[key].setdefault(step.rank, (number, []))[1].append(index)
    waits: list[dict[int, float]] = [{} for _ in steps]
    for (_, _, _, size, *_), by_rank in runs.items():
        if len(by_rank) == size and len({len(indexes) for _, indexes in by_rank.values()}) == 1:
            ran = [
                [(number, index, steps[number].kernels[index]) for number, index in indexes]
                for indexes in zip(
                    *([(number, index) for index in own] for number, own in by_rank.values()), strict=True
                )
            ]
            usual = _usual_transfers([kernel for _, _, kernel in of_ranks] for of_ranks in ran)
            for of_ranks in ran:
                shortest = min(kernel.us for *_, kernel in of_ranks)
                for number, index, kernel in of_ranks:
                    waits[number][index] = kernel.us - transfer_of(shortest, usual[kernel.call])
    return waits


def _usual_transfers(collectives: Iterable[Sequence[KernelTime]]) -> dict[int | None, float]:
    """Of each Call, microseconds. `collectives`: the kernels of each, by rank."""
    transfers: dict[int | None, list[float]] = defaultdict(list)
    for kernels in collectives:
        for kernel in kernels:
            transfers[kernel.call].append(min(each.us for each in kernels))
    return {call: usual_transfer(us) for call, us in transfers.items()}


def step_kind(step: StepCoverage) -> StepKind:
    return StepKind(step.phase, step.tokens, step.sequences, step.mode, step.padded)


def invocations_in(recording: Recording, steps: Sequence[StepCoverage]) -> Counter[int]:
    """The invocations of each kernel in `steps`, by their Programs; views and allocations only with GPU time."""
    calls_on_gpu = {kernel.call for step in steps for kernel in step.kernels}
    steps_by_program = Counter(step.program for step in steps)
    invocations: Counter[int] = Counter()
    for number, times in steps_by_program.items():
        if number is not None:
            for call in recording.ran(recording.program(number)):
                invocations[call.id] += times * (call.kind == "kernel" and (call.work or call.id in calls_on_gpu))
    return +invocations


# A kernel launched later than this before the GPU runs out of work starts late: on an idle H200 a kernel started 8 to
# 20 µs after the host's call, under the profiler.
LAUNCH_US = 10.0


# The GPU's own gap between two kernels, used where a kind has too few gaps of its own: about a microsecond between the
# nodes of a graph; on an H200 1.0 to 1.8 between kernels of a stream, under the profiler.
GAP_US = 1.0
FEWEST_GAPS = 10  # for a median


_EndedKernel = tuple[KernelTime, float, float]  # a kernel, its start, and the end of the last that ended up to it


@dataclass(frozen=True)
class Span:
    """`us`: from first start to last end. `waits_us`: of it, the GPU's waits for the host to launch; `peers_us`: its
    waits for other ranks, within collectives.

    A wait for the host is the part of a gap beyond `gap_us`, the GPU's own.
    """

    us: float
    waits_us: float
    gap_us: float = GAP_US
    peers_us: float = 0.0

    @property
    def own_us(self) -> float:
        """Without the waits."""
        return self.us - self.waits_us - self.peers_us


@dataclass(frozen=True)
class _Gap:
    """The `us` before `kernel`, from the time `dry` when all others had ended; negative if it started earlier."""

    kernel: KernelTime
    dry: float
    us: float

    @property
    def late(self) -> bool:
        """Whether the host launched the kernel when the GPU was out of work, or about to be."""
        launched = self.kernel.launched_us
        return launched is not None and launched > self.dry - LAUNCH_US

    @property
    def plain(self) -> bool:
        """Whether it is the GPU's own, between two kernels of a stream."""
        return self.us > 0 and not self.late and not self.kernel.graph and self.kernel.launched_us is not None


def span_of_step(step: StepCoverage, gap_us: float = GAP_US) -> Span | None:
    """A step's span; None if it ran nothing, or its Recording has no start times (made before format 1.3).

    `gap_us`: the GPU's own gap between two kernels, from `median_gap`.
    """
    ended = _kernels_with_ends(step)
    if not ended:
        return None
    waits = sum(max(gap.us - gap_us, 0.0) for gap in _gaps(ended) if gap.late)
    return Span(ended[-1][2] - ended[0][1], waits, gap_us)


def shared_times(step: StepCoverage) -> list[tuple[KernelTime, float]]:
    """Each kernel with the microseconds in which one of another Call ran, too."""
    shared = [0.0] * len(step.kernels)
    running: list[int] = []
    for number, (kernel, start, _) in enumerate(_kernels_with_ends(step)):
        running = [other for other in running if _end(step.kernels[other]) > start]
        for other in running:
            if step.kernels[other].call != kernel.call:
                both = min(_end(step.kernels[other]), _end(kernel)) - start
                shared[other] += both
                shared[number] += both
        running.append(number)
    return [(kernel, min(us, kernel.us)) for kernel, us in zip(step.kernels, shared, strict=True)]


def _end(kernel: KernelTime) -> float:
    return (kernel.start_us or 0.0) + kernel.us


def overlap_of_step(step: StepCoverage) -> float:
    """By how much the sum of its kernels' times exceeds the time in which any of them ran, in microseconds."""
    ended = _kernels_with_ends(step)
    waits = sum(max(gap.us, 0.0) for gap in _gaps(ended))
    return max(sum(kernel.us for kernel, _, _ in ended) + waits - (ended[-1][2] - ended[0][1]), 0.0) if ended else 0.0


def median_gap(steps: Sequence[StepCoverage]) -> float:
    """The GPU's own gap between two kernels of a stream, in microseconds: the median where the host was not late.

    Without graphs, whose nodes are closer together, and without kernels that start before the previous one has ended.
    GAP_US if fewer than ten gaps are left.
    """
    gaps = [gap.us for step in steps for gap in _gaps(_kernels_with_ends(step)) if gap.plain]
    return median(gaps) if len(gaps) >= FEWEST_GAPS else GAP_US


def _kernels_with_ends(step: StepCoverage) -> list[_EndedKernel]:
    """Each kernel with its start and end; empty if a start is unknown."""
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

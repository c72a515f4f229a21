"""The engine's side: the profiled steps of a Recording by kind, with the GPU time of every Call in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from kcap.errors import CallError
from kcap.replay.fidelity.span import Span, own_gap, span
from kcap.schemas import coverage
from kcap.schemas.coverage import KernelTime, StepCoverage
from kcap.schemas.recording import GraphUse, Phase, Recording


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
        size = f"{_number(self.tokens, 'token')} of {_number(self.sequences, 'sequence')}"
        return f"{self.phase}, {size}, {graphs}" + (f" padded to {self.padded:,}" if self.padded else "")


def _number(count: int, what: str) -> str:
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
        gap = own_gap(self.steps)
        spans = [found for step in self.steps if (found := span(step, gap)) is not None]
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
        groups.setdefault(kind_of(step), []).append(step)
    kinds = [KindSteps(kind, steps, invocations(recording, steps)) for kind, steps in groups.items()]
    busy = [each for each in kinds if each.gpu_us > 0]
    if not busy:
        raise CallError(f"{recording.path}: its profiled steps used no GPU: record with --check-coverage on a GPU")
    return sorted(busy, key=lambda each: -each.gpu_us)


def kind_of(step: StepCoverage) -> StepKind:
    return StepKind(step.phase, step.tokens, step.sequences, step.mode, step.padded)


def invocations(recording: Recording, steps: Sequence[StepCoverage]) -> Counter[int]:
    """How often each kernel ran in `steps`, by their Programs; views and allocations only if the GPU worked for one."""
    worked = {kernel.call for step in steps for kernel in step.kernels}
    ran = Counter(step.program for step in steps)
    found: Counter[int] = Counter()
    for number, times in ran.items():
        if number is not None:
            for call in recording.ran(recording.program(number)):
                found[call.id] += times * (call.kind == "kernel" and (call.work or call.id in worked))
    return +found

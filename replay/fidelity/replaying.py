"""The replay's side: what the profiled steps of a Recording ran, replayed on a GPU and held against them.

Their own values were not recorded: each Call runs on the Sample that comes closest to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

from kcap.errors import CallError
from kcap.replay.fidelity.compare import Provenance, ReplayedCall, compare
from kcap.replay.fidelity.engine import KindSteps, StepKind
from kcap.replay.fidelity.verdict import PROGRAM, SERVING, Fidelity, KindFidelity, ProgramTime
from kcap.replay.jobs import CallJob, SampleGroup
from kcap.replay.program.choose import ChosenProgram, ProgramKind
from kcap.replay.program.job import LEAST_TIMEOUT_S, AloneResult, ProgramJob
from kcap.replay.source import Samples, home_device, needs_sample, samples_by_call
from kcap.schemas.recording.recording import Call, Recording, Sample, Step
from kcap.schemas.results.coverage import StepCoverage
from kcap.schemas.results.measurement import Measurement, ProgramCall, ProgramMeasurement
from kcap.system.worker_process import Worker

StepsByPlace = Mapping[tuple[int, int], Step]  # by rank and index


@dataclass(frozen=True)
class NearestSample:
    """A Sample, its line of samples.jsonl from 0, and its step's context over that of the profiled steps.

    `sample` None: the Call has none. `context` 1.02: the sequences were 2 % longer; None: it is not known.
    """

    sample: Sample | None = None
    index: int | None = None
    context: float | None = None


def steps_by_place(steps: Iterable[Step]) -> StepsByPlace:
    return {(step.rank, step.index): step for step in steps}


def context_of_step(step: Step | StepCoverage) -> float | None:
    """What attention works through: over the sequences, new tokens times context; None where the step lists none."""
    if not step.lengths:
        return None
    queries = step.queries if len(step.queries) == len(step.lengths) else [1] * len(step.lengths)
    return float(sum(new * length for new, length in zip(queries, step.lengths, strict=True)))


def nearest_sample(
    samples: Sequence[tuple[int, Sample]], kind: StepKind, profiled: Sequence[StepCoverage], steps: StepsByPlace
) -> NearestSample:
    """Of `samples` (with their lines): first of this phase, then of as many sequences and tokens, then by context.

    Sequences that a step does not list leave the context unknown: such a Sample comes last.
    """
    known = [found for step in profiled if (found := context_of_step(step)) is not None]
    wanted = fmean(known) if known else None
    candidates = [_Candidate.of(index, sample, kind, wanted, steps) for index, sample in samples]
    best = min(candidates, key=lambda one: one.distance, default=None)
    return NearestSample() if best is None else NearestSample(best.sample, best.index, best.context)


@dataclass(frozen=True)
class _Candidate:
    sample: Sample
    index: int
    context: float | None
    distance: tuple[bool, int, int, float, int]

    @classmethod
    def of(cls, index: int, sample: Sample, kind: StepKind, wanted: float | None, steps: StepsByPlace) -> _Candidate:
        step = None if sample.step is None else steps.get((sample.rank, sample.step))
        there = context_of_step(step) if step is not None else None
        ratio = there / wanted if there is not None and wanted else None
        size = (abs(step.sequences - kind.sequences), abs(step.tokens - kind.tokens)) if step else (1 << 62, 1 << 62)
        off = float("inf") if ratio is None else max(ratio, 1 / ratio) if ratio else float("inf")
        return cls(sample, index, ratio, (sample.phase != kind.phase, *size, off, index))


NO_DURATIONS = "the profiler saw no kernel of its replay"


ON_HOST = "its replay used no GPU"


NO_PROGRAM = "its steps name no Program"


ChosenSamples = Mapping[int, NearestSample]  # the Sample for each Call, by id


class Replayer(Protocol):
    """What replays; kcap.replay.fidelity.replaying has the one that does it on a GPU."""

    def call(self, call: Call, chosen: NearestSample, kind: KindSteps) -> Measurement:
        """One Call alone, in the `serving` state, with its kernels' durations."""

    def program(self, number: int, chosen: ChosenSamples, kind: KindSteps) -> ProgramMeasurement:
        """A Program as a whole, with its kernels' durations."""


@dataclass
class FidelityRun:
    """What was held against each other, and the measurements that it rests on."""

    fidelity: Fidelity
    measurements: list[Measurement] = field(default_factory=list)
    programs: list[ProgramMeasurement] = field(default_factory=list)


def replay_kinds(
    recording: Recording, kinds: list[KindSteps], replayer: Replayer, tell: Callable[[str], None] = lambda name: None
) -> FidelityRun:
    """Replay every Call and Program of `kinds`; `tell` hears of each before it is replayed."""
    samples, steps = samples_by_call(recording.samples), steps_by_place(recording.steps)
    ran = FidelityRun(Fidelity([]))
    for kind in kinds:
        chosen = {number: choose_sample(recording.calls[number], kind, samples, steps) for number in kind.invocations}
        alone = {}
        for number, sample in chosen.items():
            tell(recording.calls[number].operator)
            ran.measurements.append(measurement := replayer.call(recording.calls[number], sample, kind))
            alone[number] = replayed_call(measurement, sample)
        tell(f"Program of {kind.kind.phase}")
        whole = None if kind.program is None else replayer.program(kind.program, chosen, kind)
        ran.programs += [whole] if whole else []
        ran.fidelity.kinds.append(compare_kind(recording, kind, alone, whole))
    return ran


def compare_kind(
    recording: Recording, kind: KindSteps, alone: Mapping[int, ReplayedCall], whole: ProgramMeasurement | None
) -> KindFidelity:
    calls = {call.id: call for call in recording.calls}
    inside = {call.call: replayed_in_program(call) for call in whole.calls} if whole else {}
    serving, in_program = compare(kind, calls, alone, SERVING), compare(kind, calls, inside, PROGRAM)
    return KindFidelity.of(kind, serving, in_program, program_time(whole))


def choose_sample(call: Call, kind: KindSteps, samples: Samples, steps: StepsByPlace) -> NearestSample:
    return (
        nearest_sample(samples.get(call.id, []), kind.kind, kind.steps, steps)
        if needs_sample(call)
        else NearestSample()
    )


def replayed_call(measurement: Measurement, chosen: NearestSample) -> ReplayedCall:
    """Kernel durations and nothing else: another clock's time is no answer."""
    names, how = frozenset(kernel.name for kernel in measurement.kernels), Provenance.of(measurement)
    if measurement.status != "ok":
        return ReplayedCall(reason=f"{measurement.status}: {measurement.reason}", sample=chosen.index, how=how)
    us = 0.0 if measurement.method == "none" else measurement.kernel_us
    reason = "" if us is not None else ON_HOST if measurement.method == "host" else NO_DURATIONS
    return ReplayedCall(us, reason, names, chosen.index, chosen.context, how)


def replayed_in_program(call: ProgramCall) -> ReplayedCall:
    if call.status in ("skipped", "failed"):
        return ReplayedCall(reason=f"{call.status}: {call.reason}", sample=call.sample)
    names = frozenset(kernel.name for kernel in call.kernels)
    if call.status == "host":
        return ReplayedCall(reason=ON_HOST, sample=call.sample)
    return ReplayedCall(call.us, "" if call.us is not None else NO_DURATIONS, names, call.sample)


def program_time(whole: ProgramMeasurement | None) -> ProgramTime:
    if whole is None:
        return ProgramTime(reason=NO_PROGRAM)
    if whole.status != "ok" or whole.median_us is None:
        return ProgramTime(None, whole.reason or whole.status, whole.program, how=Provenance.of(whole))
    known = whole.program, whole.invocations, whole.left_out, whole.unmatched_us or 0.0, whole.stretches
    return ProgramTime(whole.median_us, "", *known, Provenance.of(whole), whole.clocks.sm_mhz if whole.clocks else None)


CPU_HINT = ": pass --device cpu"


@contextmanager
def replayer(
    recording: Recording, device: str | None, seconds: float, timeout: float, trust: bool
) -> Iterator[GpuReplayer]:
    """What replays `recording`'s Calls; CallError where there is no GPU."""
    session = {
        "home": home_device(recording.calls),
        "root": str(recording.path.resolve()),
        "namespaces": sorted({call.namespace for call in recording.calls}),
        "trust": trust,
        "device": device,
        "threads": None,
        "cache": "serving",
        "kernels": True,
    }
    with ExitStack() as stack:
        try:
            worker = stack.enter_context(Worker(session))
        except CallError as error:
            raise CallError(f"--fidelity replays on a GPU: {str(error).removesuffix(CPU_HINT)}") from None
        if not str(worker.environment["device"]).startswith("cuda"):
            raise CallError("--fidelity compares GPU time, and this Recording is of a CPU")
        yield GpuReplayer(recording, worker, seconds, timeout)


class GpuReplayer:
    """A Replayer; a Call that several kinds of steps ran on one Sample is replayed once."""

    def __init__(self, recording: Recording, worker: Worker, seconds: float, timeout: float) -> None:
        self.recording, self._worker = recording, worker
        self._seconds, self._timeout = seconds, timeout
        self._answers: dict[tuple[int, int | None], dict[str, Any]] = {}

    @property
    def environment(self) -> dict[str, Any]:
        return self._worker.environment

    def call(self, call: Call, chosen: NearestSample, kind: KindSteps) -> Measurement:
        """As kcap.replay.fidelity.replaying.Replayer has it."""
        phase = kind.kind.phase
        job = CallJob({phase: kind.invocations[call.id]}, call, [SampleGroup(chosen.sample, chosen.index, [phase])])
        (request,) = job.requests(self._seconds)
        place = (call.id, chosen.index)
        if place not in self._answers:
            self._answers[place] = self._worker.run(request.body, self._timeout)
        return Measurement.model_validate({**self.environment, **self._answers[place], **request.told})

    def program(self, number: int, chosen: Mapping[int, NearestSample], kind: KindSteps) -> ProgramMeasurement:
        """As kcap.replay.fidelity.replaying.Replayer has it, of the Calls that `call` replayed."""
        of = kind.kind
        one = ChosenProgram(self.recording.program(number), ProgramKind(of.phase, of.mode, of.padded), len(kind.steps))
        job = ProgramJob(self.recording, one, {call: sample.index for call, sample in chosen.items()})
        alone = {call: AloneResult.of(self._answers[call, chosen[call].index]) for call in job.counts}
        request = job.request(alone, self._seconds)
        answer = self._worker.run(request.body, max(self._timeout, LEAST_TIMEOUT_S))
        return job.measured(alone, answer, self.environment)

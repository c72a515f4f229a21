"""The replay's side: the Calls and Programs of a Recording's profiled steps, replayed on a GPU and compared.

The values that a profiled step had were not recorded: each Call runs on the Sample that comes closest to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

import orjson

from kcap.errors import CallError
from kcap.replay.fidelity.compare import Provenance, ReplayedCall, compare
from kcap.replay.fidelity.engine import KindSteps, StepKind
from kcap.replay.fidelity.verdict import PROGRAM, SERVING, Fidelity, KindFidelity, ProgramTime
from kcap.replay.group.workers import GroupedWorker, call_of_any_rank
from kcap.replay.jobs import REPLAY_WORKER, SAME_CONTEXT, BatchFields, CallJob, ReplaySession, SampleGroup
from kcap.replay.program.choose import ChosenProgram, ProgramKind
from kcap.replay.program.job import MIN_TIMEOUT_S, ProgramJob, StandaloneResult
from kcap.replay.source import Samples, needs_sample, replay_session, samples_by_call
from kcap.schemas.recording.recording import Call, Metadata, Recording, Sample, Step
from kcap.schemas.results.coverage import StepCoverage
from kcap.schemas.results.measurement import Measurement, ProgramCall, ProgramMeasurement
from kcap.system.worker_process import Environment, Worker

StepsByRank = Mapping[tuple[int, int], Step]  # by rank and index


@dataclass(frozen=True)
class NearestSample:
    """A Sample, its line in samples.jsonl (from 0), and its step's context over that of the profiled steps.

    `sample` None: the Call has none. `context` 1.02: the sequences were 2 % longer; None: unknown. `sequences`: of its
    step; None: unknown.
    """

    sample: Sample | None = None
    index: int | None = None
    context: float | None = None
    sequences: int | None = None


def steps_by_rank(steps: Iterable[Step]) -> StepsByRank:
    return {(step.rank, step.index): step for step in steps}


def context_of_step(step: Step | StepCoverage) -> float | None:
    """The work of attention: new tokens times context, over all sequences; None where the step does not list them."""
    if not step.lengths:
        return None
    queries = step.queries if len(step.queries) == len(step.lengths) else [1] * len(step.lengths)
    return float(sum(new * length for new, length in zip(queries, step.lengths, strict=True)))


def nearest_sample(
    samples: Sequence[tuple[int, Sample]], kind: StepKind, profiled: Sequence[StepCoverage], steps: StepsByRank
) -> NearestSample:
    """The nearest of `samples` (with their lines): by phase, then sequences, then tokens, then context.

    A Sample whose context is unknown, because its step does not list its sequences, comes last.
    """
    contexts = [context for step in profiled if (context := context_of_step(step)) is not None]
    profiled_context = fmean(contexts) if contexts else None
    candidates = [_Candidate.of(index, sample, kind, profiled_context, steps) for index, sample in samples]
    best = min(candidates, key=lambda candidate: candidate.distance, default=None)
    return NearestSample() if best is None else best.found


@dataclass(frozen=True)
class _Candidate:
    found: NearestSample
    distance: tuple[bool, int, int, float, int]

    @classmethod
    def of(
        cls, index: int, sample: Sample, kind: StepKind, profiled_context: float | None, steps: StepsByRank
    ) -> _Candidate:
        step = None if sample.step is None else steps.get((sample.rank, sample.step))
        context = context_of_step(step) if step is not None else None
        ratio = context / profiled_context if context is not None and profiled_context else None
        size = (abs(step.sequences - kind.sequences), abs(step.tokens - kind.tokens)) if step else (1 << 62, 1 << 62)
        factor = max(ratio, 1 / ratio) if ratio else float("inf")
        distance = sample.phase != kind.phase, *size, factor, index
        return cls(NearestSample(sample, index, ratio, step.sequences if step else None), distance)


NO_DURATIONS = "the profiler saw no kernel of its replay"
ON_HOST = "its replay used no GPU"
NO_PROGRAM = "its steps name no Program"


ChosenSamples = Mapping[int, NearestSample]  # the Sample for each Call, by id


class Replayer(Protocol):
    """Replays Calls and Programs: GpuReplayer, or a substitute in a test."""

    def call(self, call: Call, chosen: NearestSample, kind: KindSteps) -> Measurement:
        """One Call by itself, in the `serving` state, with the durations of its kernels."""

    def program(self, number: int, chosen: ChosenSamples, kind: KindSteps) -> ProgramMeasurement:
        """A Program as a whole, with the durations of its kernels."""


@dataclass
class FidelityRun:
    """The comparison, and the measurements that it rests on."""

    fidelity: Fidelity
    measurements: list[Measurement] = field(default_factory=list)
    programs: list[ProgramMeasurement] = field(default_factory=list)


def replay_kinds(
    recording: Recording,
    kinds: list[KindSteps],
    replayer: Replayer,
    show_progress: Callable[[str], None] = lambda name: None,
) -> FidelityRun:
    """Replay every Call and Program of `kinds`; call `show_progress` before each."""
    samples, steps = samples_by_call(recording.samples, compared=True), steps_by_rank(recording.steps)
    run = FidelityRun(Fidelity([]))
    for kind in kinds:
        chosen = {number: choose_sample(recording.calls[number], kind, samples, steps) for number in kind.invocations}
        standalone = {}
        for number, sample in chosen.items():
            show_progress(recording.calls[number].operator)
            run.measurements.append(measurement := replayer.call(recording.calls[number], sample, kind))
            standalone[number] = replayed_call(measurement, sample)
        show_progress(f"Program of {kind.kind.phase}")
        program = None if kind.program is None else replayer.program(kind.program, chosen, kind)
        run.programs += [program] if program else []
        run.fidelity.kinds.append(compare_kind(recording, kind, standalone, program))
    return run


def compare_kind(
    recording: Recording, kind: KindSteps, standalone: Mapping[int, ReplayedCall], program: ProgramMeasurement | None
) -> KindFidelity:
    calls = {call.id: call for call in recording.calls}
    inside = {call.call: replayed_in_program(call) for call in program.calls} if program else {}
    inside |= of_other_ranks(inside, [calls[number] for number in kind.invocations])
    serving, in_program = compare(kind, calls, standalone, SERVING), compare(kind, calls, inside, PROGRAM)
    return KindFidelity.of(kind, serving, in_program, program_time(program))


def of_other_ranks(inside: Mapping[int, ReplayedCall], calls: Iterable[Call]) -> dict[int, ReplayedCall]:
    """Those `calls` that no Call inside a Program is, but that are one of them in another rank of its group."""

    def key(call: Call) -> bytes:
        return orjson.dumps(call_of_any_rank(call.model_dump(mode="json")))

    collectives = [call for call in calls if call.group]
    by_key = {key(call): inside[call.id] for call in collectives if call.id in inside}
    others = {call.id: by_key.get(key(call)) for call in collectives if call.id not in inside}
    return {number: replayed for number, replayed in others.items() if replayed}


def choose_sample(call: Call, kind: KindSteps, samples: Samples, steps: StepsByRank) -> NearestSample:
    if not needs_sample(call):
        return NearestSample()
    return nearest_sample(samples.get(call.id, []), kind.kind, kind.steps, steps)


def replayed_call(measurement: Measurement, chosen: NearestSample) -> ReplayedCall:
    """Its time by kernel durations alone: the time of another clock cannot be compared with the engine's."""
    names, provenance = frozenset(kernel.name for kernel in measurement.kernels), Provenance.of(measurement)
    if measurement.status != "ok":
        reason = f"{measurement.status}: {measurement.reason}"
        return ReplayedCall(reason=reason, sample=chosen.index, provenance=provenance)
    us = 0.0 if measurement.method == "none" else measurement.kernel_us
    reason = "" if us is not None else ON_HOST if measurement.method == "host" else NO_DURATIONS
    return ReplayedCall(us, reason, names, chosen.index, chosen.context, chosen.sequences, provenance)


def replayed_in_program(call: ProgramCall) -> ReplayedCall:
    if call.status in ("skipped", "failed"):
        return ReplayedCall(reason=f"{call.status}: {call.reason}", sample=call.sample)
    names = frozenset(kernel.name for kernel in call.kernels)
    if call.status == "host":
        return ReplayedCall(reason=ON_HOST, sample=call.sample)
    return ReplayedCall(call.us, "" if call.us is not None else NO_DURATIONS, names, call.sample)


def program_time(program: ProgramMeasurement | None) -> ProgramTime:
    if program is None:
        return ProgramTime(reason=NO_PROGRAM)
    provenance = Provenance.of(program)
    if program.status != "ok" or program.median_us is None:
        return ProgramTime(None, program.reason or program.status, program.program, provenance=provenance)
    return ProgramTime(
        us=program.median_us - (program.waited_us or 0.0),
        program=program.program,
        invocations=program.invocations,
        left_out=program.left_out,
        unmatched_us=program.unmatched_us or 0.0,
        stretches=program.stretches,
        provenance=provenance,
        sm_mhz=program.clocks.sm_mhz if program.clocks else None,
    )


CPU_HINT = ": pass --device cpu"


@contextmanager
def open_replayer(
    recording: Recording, device: str | None, seconds: float, timeout: float, trust: bool
) -> Iterator[GpuReplayer]:
    """The Replayer of a Recording; CallError where there is no GPU."""
    session: ReplaySession = {
        **replay_session(recording, recording.calls, recording.calls, trust),
        "device": device,
        "threads": None,
        "cache": "serving",
        "kernels": True,
        "dummy_weights": loaded_dummy_weights(recording.metadata),
    }
    with ExitStack() as stack:
        try:
            worker = stack.enter_context(GroupedWorker(session, REPLAY_WORKER))
        except CallError as error:
            raise CallError(f"--compare-engine replays on a GPU: {str(error).removesuffix(CPU_HINT)}") from None
        if not worker.environment["device"].startswith("cuda"):
            raise CallError("--compare-engine compares GPU time, and this Recording is of a CPU")
        yield GpuReplayer(recording, worker, seconds, timeout)


def loaded_dummy_weights(metadata: Metadata) -> bool:
    """Whether the engine drew its weights as they are stored: what it quantizes itself it draws in wider floats."""
    arguments = metadata.engine_arguments
    return str(arguments.get("load_format")).lower() == "dummy" and not arguments.get("quantization")


AnswerKey = tuple[int, int | None, StepKind | None]  # a Call, its Sample, and the kind of step where that decides


class GpuReplayer:
    """Replays each Call once on each Sample, also where several kinds of steps ran it.

    Where no Sample has the context of a kind of step, the Call runs on the sequences of a step of that kind.
    """

    def __init__(self, recording: Recording, worker: Worker, seconds: float, timeout: float) -> None:
        self.recording, self._worker = recording, worker
        self._seconds, self._timeout = seconds, timeout
        self._answers: dict[AnswerKey, dict[str, Any]] = {}

    @property
    def environment(self) -> Environment:
        return self._worker.environment

    def call(self, call: Call, chosen: NearestSample, kind: KindSteps) -> Measurement:
        """See Replayer."""
        phase = kind.kind.phase
        job = CallJob({phase: kind.invocations[call.id]}, call, [SampleGroup(chosen.sample, chosen.index, [phase])])
        (request,) = job.requests(self._seconds)
        key = answer_key(call, chosen, kind)
        if key not in self._answers:
            self._answers[key] = self._worker.run({**request.body, "batch": batch_of(kind)}, self._timeout)
        return Measurement.model_validate({**self.environment, **self._answers[key], **request.labels})

    def program(self, number: int, chosen: Mapping[int, NearestSample], kind: KindSteps) -> ProgramMeasurement:
        """See Replayer; `call` has replayed each of its Calls."""
        program_kind = ProgramKind(kind.kind.phase, kind.kind.mode, kind.kind.padded)
        program = ChosenProgram(self.recording.program(number), program_kind, len(kind.steps))
        job = ProgramJob(self.recording, program, {call: sample.index for call, sample in chosen.items()})
        calls = self.recording.calls
        standalone = {
            call: StandaloneResult.of(self._answers[answer_key(calls[call], chosen[call], kind)]) for call in job.counts
        }
        request = {**job.request(standalone, self._seconds), "batch": batch_of(kind)}
        answer = self._worker.run(request, max(self._timeout, MIN_TIMEOUT_S))
        return job.measurement(standalone, answer, self.environment)


def answer_key(call: Call, chosen: NearestSample, kind: KindSteps) -> AnswerKey:
    same = chosen.context is not None and abs(chosen.context - 1) <= SAME_CONTEXT
    return call.id, chosen.index, kind.kind if needs_sample(call) and not same else None


def batch_of(kind: KindSteps) -> BatchFields:
    """The sequences of the profiled step in the middle of its kind."""
    step = kind.steps[len(kind.steps) // 2]
    return {"queries": step.queries, "lengths": step.lengths, "padded": step.padded}

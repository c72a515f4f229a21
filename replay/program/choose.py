"""Which Programs to replay, and on which Sample each of their Calls runs.

The most frequent Program of each phase, mode and padded size, or that of one recorded step. Samples of the same step
are preferred, since their lengths agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kcap.errors import CallError
from kcap.replay.source import Samples, needs_sample, samples_by_call
from kcap.schemas.recording.recording import Call, GraphUse, Phase, Program, Recording, Sample, Step

RankStep = tuple[int, int]


@dataclass(frozen=True)
class ProgramKind:
    """Programs of one kind are variants of each other. `padded`: the tokens that the graphs were captured for."""

    phase: Phase
    mode: GraphUse
    padded: int | None


@dataclass(frozen=True)
class ChosenProgram:
    """A Program, its kind, and how often it ran as that kind. `step`: the recorded step that was asked for."""

    program: Program
    kind: ProgramKind
    count: int
    step: Step | None = None


def most_frequent_programs(recording: Recording, phase: Phase | None = None) -> list[ChosenProgram]:
    """The most frequent Program of each kind, in the order of their counts; CallError where there is none."""
    best: dict[ProgramKind, ChosenProgram] = {}
    for candidate in _programs_by_phase(recording):
        current = best.get(candidate.kind)
        if phase in (None, candidate.kind.phase) and (current is None or candidate.count > current.count):
            best[candidate.kind] = candidate
    if not best:
        raise CallError(f"{recording.path}: {_why_none(recording, phase)}")
    return sorted(best.values(), key=lambda candidate: (-candidate.count, candidate.program.id))


def _why_none(recording: Recording, phase: Phase | None) -> str:
    phases = sorted({count.phase for program in recording.programs for count in program.counts})
    if phases:
        return f"holds no Program of phase {phase}, only of {', '.join(phases)}"
    return "holds no Programs: record steps (kcap record does; in Python, recorder.step())"


def _programs_by_phase(recording: Recording) -> Iterator[ChosenProgram]:
    """Every Program in each phase that it ran in, without graphs that a step replays: they run as part of the step."""
    inner = {number for program in recording.programs for _, number in program.graphs}
    for program in recording.programs:
        if program.kind == "graph" and program.id in inner:
            continue
        counts: Counter[Phase] = Counter()
        for count in program.counts:
            counts[count.phase] += count.count
        for phase, times in counts.items():
            if times:
                yield ChosenProgram(program, ProgramKind(phase, *graph_use(recording, program)), times)


def graph_use(recording: Recording, program: Program) -> tuple[GraphUse, int | None]:
    """How a Program uses graphs, and the largest size that these were captured for."""
    graphs = [program] if program.kind == "graph" else [recording.program(number) for _, number in program.graphs]
    if not graphs:
        return "eager", None
    padded = max((graph.size for graph in graphs if graph.size is not None), default=None)
    scopes = {graph.scope for graph in graphs}
    return "full" if "full" in scopes or (scopes == {None} and len(graphs) == 1) else "piecewise", padded


def program_of_step(recording: Recording, index: int) -> ChosenProgram:
    """The Program of the step `index`, of the lowest rank that has it; CallError lists the steps that there are."""
    steps = [step for step in recording.steps if step.index == index]
    option = f"{recording.path}: --step {index}"
    if not steps:
        indices = sorted({step.index for step in recording.steps})
        which = f"{len(indices)}, from {indices[0]} to {indices[-1]}" if indices else "none"
        raise CallError(f"{option}: not among the steps that steps.jsonl keeps ({which})")
    step = min(steps, key=lambda step: step.rank)
    if step.program is None:
        raise CallError(f"{option}: the Recording does not have its Program")
    program = recording.program(step.program)
    times = sum(count.count for count in program.counts if count.phase == step.phase)
    return ChosenProgram(program, ProgramKind(step.phase, step.mode, step.padded), times, step)


def choose_samples(recording: Recording, chosen: ChosenProgram, calls: Iterable[Call]) -> dict[int, int | None]:
    """By each Call that needs a Sample: its line in samples.jsonl, from 0; None where there is none.

    Of the Program's phase, and of the step asked for, or else of the Program's step with the most Samples; where the
    Call was not sampled in that step, of the nearest one, of the same rank if that has any: replicas' batches differ.
    """
    samples = samples_by_call(recording.samples, compared=chosen.step is not None)
    needing = [call for call in calls if needs_sample(call)]
    step = common_step(recording, chosen, samples, needing)
    return {call.id: nearest_line(samples.get(call.id, []), chosen.kind.phase, step) for call in needing}


def common_step(
    recording: Recording, chosen: ChosenProgram, samples: Samples, calls: Iterable[Call]
) -> RankStep | None:
    """The step that was asked for, else the Program's step in which most of `calls` were sampled."""
    if chosen.step is not None:
        return chosen.step.rank, chosen.step.index
    phase = chosen.kind.phase
    own_steps = {
        (step.rank, step.index) for step in recording.steps if (step.program, step.phase) == (chosen.program.id, phase)
    }
    sampled = {
        (call.id, (sample.rank, sample.step))
        for call in calls
        for _, sample in samples.get(call.id, [])
        if sample.phase == phase and sample.step is not None
    }
    samples_by_step = Counter[RankStep](step for _, step in sampled)

    def preferred(step: RankStep) -> tuple[bool, int, int, int]:
        rank, index = step
        return step in own_steps, samples_by_step[step], -index, -rank

    return max(samples_by_step, key=preferred, default=None)


def nearest_line(samples: Iterable[tuple[int, Sample]], phase: str, step: RankStep | None) -> int | None:
    """The line of the Sample nearest to `step`, of this phase and its rank if there is one."""

    def distance(item: tuple[int, Sample]) -> tuple[bool, bool, bool, int, int]:
        line, sample = item
        if step is None:
            return sample.phase != phase, False, False, 0, line
        rank, index = step
        steps_away = 0 if sample.step is None else abs(sample.step - index)
        return sample.phase != phase, sample.step is None, sample.rank != rank, steps_away, line

    nearest = min(samples, key=distance, default=None)
    return None if nearest is None else nearest[0]

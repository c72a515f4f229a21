"""Which Programs to replay: the most frequent of each phase, mode and padded size, or that of one recorded step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kcap.errors import CallError
from kcap.schemas.recording import GraphUse, Phase, Program, Recording, Step


@dataclass(frozen=True)
class Kind:
    """What tells Programs apart that are no variants of each other. `padded`: the tokens its graphs are for."""

    phase: Phase
    mode: GraphUse
    padded: int | None


@dataclass(frozen=True)
class Chosen:
    """A Program, as which kind, and how often it ran as that; `step`: the recorded step that was asked for."""

    program: Program
    kind: Kind
    count: int
    step: Step | None = None


def most_frequent(recording: Recording, phase: Phase | None = None) -> list[Chosen]:
    """One Program of each kind, the most frequent first; CallError where there is none."""
    best: dict[Kind, Chosen] = {}
    for one in _all(recording):
        known = best.get(one.kind)
        if phase in (None, one.kind.phase) and (known is None or one.count > known.count):
            best[one.kind] = one
    if not best:
        raise CallError(f"{recording.path}: {_why_none(recording, phase)}")
    return sorted(best.values(), key=lambda one: (-one.count, one.program.id))


def _why_none(recording: Recording, phase: Phase | None) -> str:
    phases = sorted({count.phase for program in recording.programs for count in program.counts})
    if phases:
        return f"holds no Program of phase {phase}, only of {', '.join(phases)}"
    return "holds no Programs: record steps (kcap record does; in Python, recorder.step())"


def _all(recording: Recording) -> Iterator[Chosen]:
    """Every Program as each phase that it ran in; a graph that a step replays runs as part of that step."""
    inner = {number for program in recording.programs for _, number in program.graphs}
    for program in recording.programs:
        if program.kind == "graph" and program.id in inner:
            continue
        counts: Counter[Phase] = Counter()
        for count in program.counts:
            counts[count.phase] += count.count
        for phase, times in counts.items():
            if times:
                yield Chosen(program, Kind(phase, *use_of(recording, program)), times)


def use_of(recording: Recording, program: Program) -> tuple[GraphUse, int | None]:
    """How a Program used graphs, and the largest size that these were captured for."""
    graphs = [program] if program.kind == "graph" else [recording.program(number) for _, number in program.graphs]
    if not graphs:
        return "eager", None
    padded = max((graph.size for graph in graphs if graph.size is not None), default=None)
    scopes = {graph.scope for graph in graphs}
    return "full" if "full" in scopes or (scopes == {None} and len(graphs) == 1) else "piecewise", padded


def of_step(recording: Recording, index: int) -> Chosen:
    """The Program of the step `index` (of the lowest rank that has it); CallError says which steps there are."""
    found = [step for step in recording.steps if step.index == index]
    where = f"{recording.path}: --step {index}"
    if not found:
        kept = sorted({step.index for step in recording.steps})
        which = f"{len(kept)}, from {kept[0]} to {kept[-1]}" if kept else "none"
        raise CallError(f"{where}: not among the steps that steps.jsonl keeps ({which})")
    step = min(found, key=lambda one: one.rank)
    if step.program is None:
        raise CallError(f"{where}: the Recording does not have its Program")
    program = recording.program(step.program)
    times = sum(count.count for count in program.counts if count.phase == step.phase)
    return Chosen(program, Kind(step.phase, step.mode, step.padded), times, step)

"""Which Sample of a Call comes closest to the profiled steps, whose own values were not recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from kcap.replay.fidelity.engine import StepKind
from kcap.schemas.coverage import StepCoverage
from kcap.schemas.recording import Sample, Step

Steps = Mapping[tuple[int, int], Step]  # by rank and index


@dataclass(frozen=True)
class Nearest:
    """A Sample, its line of samples.jsonl from 0, and its step's context over that of the profiled steps.

    `sample` None: the Call has none. `context` 1.02: the sequences were 2 % longer; None: it is not known.
    """

    sample: Sample | None = None
    index: int | None = None
    context: float | None = None


def by_place(steps: Iterable[Step]) -> Steps:
    return {(step.rank, step.index): step for step in steps}


def context(step: Step | StepCoverage) -> float | None:
    """What attention works through: over the sequences, new tokens times context; None where the step lists none."""
    if not step.lengths:
        return None
    queries = step.queries if len(step.queries) == len(step.lengths) else [1] * len(step.lengths)
    return float(sum(new * length for new, length in zip(queries, step.lengths, strict=True)))


def nearest(
    samples: Sequence[tuple[int, Sample]], kind: StepKind, profiled: Sequence[StepCoverage], steps: Steps
) -> Nearest:
    """Of `samples` (with their lines): first of this phase, then of as many sequences and tokens, then by context.

    Sequences that a step does not list leave the context unknown: such a Sample comes last.
    """
    known = [found for step in profiled if (found := context(step)) is not None]
    wanted = fmean(known) if known else None
    candidates = [_Candidate.of(index, sample, kind, wanted, steps) for index, sample in samples]
    best = min(candidates, key=lambda one: one.distance, default=None)
    return Nearest() if best is None else Nearest(best.sample, best.index, best.context)


@dataclass(frozen=True)
class _Candidate:
    sample: Sample
    index: int
    context: float | None
    distance: tuple[bool, int, int, float, int]

    @classmethod
    def of(cls, index: int, sample: Sample, kind: StepKind, wanted: float | None, steps: Steps) -> _Candidate:
        step = None if sample.step is None else steps.get((sample.rank, sample.step))
        there = context(step) if step is not None else None
        ratio = there / wanted if there is not None and wanted else None
        size = (abs(step.sequences - kind.sequences), abs(step.tokens - kind.tokens)) if step else (1 << 62, 1 << 62)
        off = float("inf") if ratio is None else max(ratio, 1 / ratio) if ratio else float("inf")
        return cls(sample, index, ratio, (sample.phase != kind.phase, *size, off, index))

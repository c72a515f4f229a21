"""The time that Solutions save, by phase: only what passed saves, and the rest stays as it was."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kcap.bench.summary.baseline import Baseline
from kcap.bench.summary.score import Score
from kcap.replay.definitions.source import UNCOUNTED, Weights

ALL = "all"  # phases together


@dataclass(frozen=True)
class Saving:
    """Microseconds: of the Workloads that passed, before and after. `total`: of the whole; None where not known."""

    before_us: float
    after_us: float
    total_us: float | None = None

    @property
    def saved_us(self) -> float:
        """Negative where the Solution is the slower."""
        return self.before_us - self.after_us

    @property
    def share(self) -> float | None:
        """Of the whole."""
        return self.saved_us / self.total_us if self.total_us else None


def savings(score: Score, weights: Weights, baseline: Baseline) -> dict[str, Saving]:
    """What a Solution saves in each phase that it ran in, and in all."""
    before: dict[str, list[float]] = defaultdict(list)
    after: dict[str, list[float]] = defaultdict(list)
    for uuid, outcome in score.outcomes.items():
        if outcome.status != "PASSED" or outcome.time is None:
            continue
        counts = weights.get((score.definition, uuid), UNCOUNTED)
        for phase, us in baseline.before(outcome, counts).items():
            before[phase].append(us)
            after[phase].append(counts[phase] * outcome.time.median_us)
    sums = {phase: (math.fsum(before[phase]), math.fsum(after[phase])) for phase in before}
    return _with_totals(sums, baseline.totals)


def together(each: Iterable[Mapping[str, Saving]], totals: Mapping[str, float]) -> dict[str, Saving]:
    """The sum of what several save."""
    sums: dict[str, tuple[float, float]] = {}
    for one in each:
        for phase, saving in one.items():
            before, after = sums.get(phase, (0.0, 0.0))
            sums[phase] = before + saving.before_us, after + saving.after_us
    sums.pop(ALL, None)
    return _with_totals(sums, totals)


def best(scores: Sequence[Score], saved: Mapping[str, Mapping[str, Saving]]) -> list[Score]:
    """Of each Definition the ranked Solution that saves most; none where all of them cost time.

    `saved`: by `key_of` of a Score.
    """
    found: dict[str, Score] = {}
    for score in scores:
        if score.ranked and _saved(saved[key_of(score)]) > max(_of(found.get(score.definition), saved), 0.0):
            found[score.definition] = score
    return list(found.values())


def key_of(score: Score) -> str:
    return f"{score.definition}/{score.name}"


def _of(score: Score | None, saved: Mapping[str, Mapping[str, Saving]]) -> float:
    return _saved(saved[key_of(score)]) if score else 0.0


def _saved(savings: Mapping[str, Saving]) -> float:
    return savings[ALL].saved_us if ALL in savings else 0.0


def _with_totals(sums: Mapping[str, tuple[float, float]], totals: Mapping[str, float]) -> dict[str, Saving]:
    """A phase alone has no total where only that of all phases is known."""
    if not sums:
        return {}
    whole = (math.fsum(before for before, _ in sums.values()), math.fsum(after for _, after in sums.values()))
    found = {phase: Saving(*pair, totals.get(phase)) for phase, pair in sorted(sums.items())}
    return {**found, ALL: Saving(*whole, math.fsum(totals.values()) if totals else None)}

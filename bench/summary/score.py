"""A Solution's Score over all Workloads of its Definition: none is left out, so that none can be skipped for gain."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kcap.replay.definitions.source import UNCOUNTED, Weights
from kcap.schemas.outcome import Outcome, Status

GRAVEST: tuple[Status, ...] = (
    "REWARD_HACK",
    "COMPILE_ERROR",
    "INCORRECT_SHAPE",
    "INCORRECT_DTYPE",
    "INCORRECT_NUMERICAL",
    "RUNTIME_ERROR",
    "TIMEOUT",
    "NOT_JUDGED",
)


@dataclass(frozen=True)
class Score:
    """`outcomes`: by Workload, each of `workloads` that has one. `count`: invocations that a Workload stands for."""

    definition: str
    author: str
    solution: str
    workloads: Sequence[str]
    outcomes: Mapping[str, Outcome]
    count: Mapping[str, int]

    @property
    def name(self) -> str:
        return f"{self.author}/{self.solution}"

    @property
    def passed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes.values() if outcome.status == "PASSED"]

    @property
    def judged(self) -> int:
        return sum(outcome.status != "NOT_JUDGED" for outcome in self.outcomes.values())

    @property
    def ranked(self) -> bool:
        """Whether it passed on every Workload, each with a speedup: only then do its means say anything."""
        return bool(self.workloads) and len(self._speedups) == len(self.workloads)

    @property
    def _speedups(self) -> dict[str, float]:
        found = {uuid: outcome.speedup for uuid, outcome in self.outcomes.items()}
        return {uuid: speedup for uuid, speedup in found.items() if speedup is not None and 0 < speedup < math.inf}

    @property
    def geometric_mean(self) -> float | None:
        """Over all Workloads, each counting once; None unless ranked."""
        if not self.ranked:
            return None
        return math.exp(math.fsum(math.log(speedup) for speedup in self._speedups.values()) / len(self.workloads))

    @property
    def weighted(self) -> float | None:
        """The reference's time over the Solution's, both summed over what the engine ran; None unless ranked."""
        if not self.ranked:
            return None
        times = [(self.count[uuid], one) for uuid, one in self.outcomes.items()]
        before = math.fsum(n * one.reference.median_us for n, one in times if one.reference)
        after = math.fsum(n * one.time.median_us for n, one in times if one.time)
        return before / after if after else None

    @property
    def statuses(self) -> dict[str, int]:
        return dict(Counter(outcome.status for outcome in self.outcomes.values()))

    @property
    def worst(self) -> Outcome | None:
        """The Outcome that tells most against it."""
        against = [outcome for outcome in self.outcomes.values() if outcome.status in GRAVEST]
        return min(against, key=lambda outcome: GRAVEST.index(outcome.status), default=None)


def score(outcomes: Iterable[Outcome], workloads: Mapping[str, Sequence[str]], weights: Weights) -> list[Score]:
    """A Score for each Solution, the best of a Definition first.

    `workloads`: uuids by Definition, all that it must pass. An Outcome on others, or on a Definition that is not
    there, counts for nothing.
    """
    found: dict[tuple[str, str, str], dict[str, Outcome]] = {}
    for outcome in outcomes:
        if outcome.definition in workloads:
            held = found.setdefault((outcome.definition, outcome.author, outcome.solution), {})
            if outcome.workload in workloads[outcome.definition]:
                held[outcome.workload] = outcome
    scores = [Score(*key, workloads[key[0]], held, _count(key[0], workloads, weights)) for key, held in found.items()]
    return sorted(scores, key=lambda one: (one.definition, not one.ranked, -(one.weighted or 0), -len(one.passed)))


def _count(definition: str, workloads: Mapping[str, Sequence[str]], weights: Weights) -> dict[str, int]:
    return {uuid: sum(weights.get((definition, uuid), UNCOUNTED).values()) for uuid in workloads[definition]}

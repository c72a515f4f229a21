"""A Solution's Score over all Workloads of its Definition, and the time that it saves, by phase.

No Workload is left out, so that none can be skipped for gain; only what passed saves, and the rest stays as it was.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kcap.bench.run.summary.baseline import Baseline
from kcap.replay.datasets.workloads import UNCOUNTED_PHASES, WorkloadWeights
from kcap.schemas.recording.phases import ALL_PHASES
from kcap.schemas.results.outcome import Outcome, Status

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
        times = [(self.count[uuid], outcome) for uuid, outcome in self.outcomes.items()]
        before = math.fsum(n * outcome.reference.median_us for n, outcome in times if outcome.reference)
        after = math.fsum(n * outcome.time.median_us for n, outcome in times if outcome.time)
        return before / after if after else None

    @property
    def spread(self) -> float | None:
        """The largest half distance of the quartiles of a speedup, relative to it; None unless ranked."""
        if not self.ranked:
            return None
        halves = [
            math.hypot(*((clock.q3_us - clock.q1_us) / 2 / clock.median_us for clock in clocks if clock))
            for clocks in ((outcome.time, outcome.reference) for outcome in self.outcomes.values())
        ]
        return max(halves)

    @property
    def statuses(self) -> dict[str, int]:
        return dict(Counter(outcome.status for outcome in self.outcomes.values()))

    @property
    def worst(self) -> Outcome | None:
        """The Outcome that tells most against it."""
        against = [outcome for outcome in self.outcomes.values() if outcome.status in GRAVEST]
        return min(against, key=lambda outcome: GRAVEST.index(outcome.status), default=None)


def score_solutions(
    outcomes: Iterable[Outcome], workloads: Mapping[str, Sequence[str]], weights: WorkloadWeights
) -> list[Score]:
    """A Score for each Solution, the best of a Definition first.

    `workloads`: uuids by Definition, all that it must pass. An Outcome on others, or on a Definition that is not
    there, counts for nothing.
    """
    by_solution: dict[tuple[str, str, str], dict[str, Outcome]] = {}
    for outcome in outcomes:
        if outcome.definition in workloads:
            judged = by_solution.setdefault((outcome.definition, outcome.author, outcome.solution), {})
            if outcome.workload in workloads[outcome.definition]:
                judged[outcome.workload] = outcome
    scores = [
        Score(*key, workloads[key[0]], judged, _counts(key[0], workloads, weights))
        for key, judged in by_solution.items()
    ]
    return sorted(
        scores, key=lambda score: (score.definition, not score.ranked, -(score.weighted or 0), -len(score.passed))
    )


def _counts(definition: str, workloads: Mapping[str, Sequence[str]], weights: WorkloadWeights) -> dict[str, int]:
    return {uuid: sum(weights.get((definition, uuid), UNCOUNTED_PHASES).values()) for uuid in workloads[definition]}


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


def savings(score: Score, weights: WorkloadWeights, baseline: Baseline) -> dict[str, Saving]:
    """What a Solution saves in each phase that it ran in, and in all."""
    before: dict[str, list[float]] = defaultdict(list)
    after: dict[str, list[float]] = defaultdict(list)
    for uuid, outcome in score.outcomes.items():
        if outcome.status != "PASSED" or outcome.time is None:
            continue
        counts = weights.get((score.definition, uuid), UNCOUNTED_PHASES)
        for phase, us in baseline.before(outcome, counts).items():
            before[phase].append(us)
            after[phase].append(counts[phase] * outcome.time.median_us)
    sums = {phase: (math.fsum(before[phase]), math.fsum(after[phase])) for phase in before}
    return _with_totals(sums, baseline.totals)


def sum_savings(savings_of: Iterable[Mapping[str, Saving]], totals: Mapping[str, float]) -> dict[str, Saving]:
    """The sum of what several save."""
    sums: dict[str, tuple[float, float]] = {}
    for savings in savings_of:
        for phase, saving in savings.items():
            before, after = sums.get(phase, (0.0, 0.0))
            sums[phase] = before + saving.before_us, after + saving.after_us
    sums.pop(ALL_PHASES, None)
    return _with_totals(sums, totals)


def best_scores(scores: Sequence[Score], saved: Mapping[str, Mapping[str, Saving]]) -> list[Score]:
    """Of each Definition the ranked Solution that saves most; none where all of them cost time.

    `saved`: by `score_key` of a Score.
    """
    best: dict[str, Score] = {}
    for score in scores:
        if score.ranked and _saved(saved[score_key(score)]) > max(_of(best.get(score.definition), saved), 0.0):
            best[score.definition] = score
    return list(best.values())


def score_key(score: Score) -> str:
    return f"{score.definition}/{score.name}"


def _of(score: Score | None, saved: Mapping[str, Mapping[str, Saving]]) -> float:
    return _saved(saved[score_key(score)]) if score else 0.0


def _saved(savings: Mapping[str, Saving]) -> float:
    return savings[ALL_PHASES].saved_us if ALL_PHASES in savings else 0.0


def _with_totals(sums: Mapping[str, tuple[float, float]], totals: Mapping[str, float]) -> dict[str, Saving]:
    """A phase alone has no total where only that of all phases is known."""
    if not sums:
        return {}
    whole = (math.fsum(before for before, _ in sums.values()), math.fsum(after for _, after in sums.values()))
    by_phase = {phase: Saving(*pair, totals.get(phase)) for phase, pair in sorted(sums.items())}
    return {**by_phase, ALL_PHASES: Saving(*whole, math.fsum(totals.values()) if totals else None)}

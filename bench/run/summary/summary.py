"""From Outcomes to a Summary: Scores, what each saves of which baseline, and what to know before believing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kcap.bench.run.bench_run import BenchRun
from kcap.bench.run.output import solution_key
from kcap.bench.run.summary.baseline import (
    Baseline,
    References,
    count_doubtful,
    different_caches,
    why_not_comparable,
)
from kcap.bench.run.summary.score import Saving, Score, best_scores, savings, score_key, score_solutions, sum_savings
from kcap.replay.datasets.workloads import UNCOUNTED_PHASES
from kcap.schemas.results.bench_run import Machine, RefusedFile
from kcap.schemas.results.outcome import Outcome


@dataclass(frozen=True)
class Summary:
    """Scores with what each saves of the baseline. `notes`: what to know before believing them; `load`: the processors
    that others had before the run and after it, as far as that is known.
    """

    scores: Sequence[Score]
    saved: Mapping[str, Mapping[str, Saving]]
    baseline: Baseline
    refused: Sequence[RefusedFile] = ()
    notes: Sequence[str] = ()
    machine: Machine = field(default_factory=Machine)
    load: tuple[float | None, float | None] = (None, None)

    @property
    def best(self) -> list[Score]:
        return best_scores(self.scores, self.saved)

    @property
    def whole(self) -> dict[str, Saving]:
        """What the best of each Definition save together."""
        return sum_savings((self.saved[score_key(score)] for score in self.best), self.baseline.totals)

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine.model_dump(),
            "baseline": self.baseline.title,
            "solutions": [
                {**_score_as_json(score), "saves": _savings_as_json(self.saved[score_key(score)])}
                for score in self.scores
            ],
            "best": [score_key(score) for score in self.best],
            "saves": _savings_as_json(self.whole),
            "refused": [one.model_dump() for one in self.refused],
            "notes": list(self.notes),
            "processors_in_use": list(self.load),
        }


def _score_as_json(score: Score) -> dict[str, Any]:
    return {
        "definition": score.definition,
        "author": score.author,
        "solution": score.solution,
        "workloads": len(score.workloads),
        "judged": score.judged,
        "passed": len(score.passed),
        "statuses": score.statuses,
        "ranked": score.ranked,
        "geometric_mean": score.geometric_mean,
        "weighted": score.weighted,
        "spread": score.spread,
        "worst": score.worst.reason if score.worst else None,
    }


def _savings_as_json(savings: Mapping[str, Saving]) -> dict[str, Any]:
    names = ("before_us", "after_us", "total_us", "saved_us", "share")
    return {phase: {name: getattr(saving, name) for name in names} for phase, saving in savings.items()}


SLOWER = (
    "on {} Workloads their references take less than half the time that was measured of the engine's kernels: "
    "the machine was not as it is now, believe no share"
)

UNWEIGHED = "no counts are known: each Workload counts as one invocation"


BUSY = "others had {} processors of this machine before the run and {} after it: its times are disturbed"
MOST_BUSY = 0.25  # processors that others may have before it is said
SHORT = "in {} of {} times the way to a Solution's process and back is more than {:.0%}: their Outcomes say how much"
MOST_WAY = 0.03


def summarize(
    bench_run: BenchRun,
    outcomes: Iterable[Outcome],
    machine: Machine,
    load: tuple[float | None, float | None] = (None, None),
) -> Summary:
    """Of the Solutions that there are, over the Workloads chosen."""
    there = {(one.solution.definition, one.solution.author, one.solution.name) for one in bench_run.solutions}
    current = [outcome for outcome in outcomes if solution_key(outcome) in there]
    chosen = {name: [workload.uuid for workload in given] for name, given in bench_run.workloads.items()}
    scores = score_solutions(current, chosen, bench_run.weights)
    base, notes = _baseline(bench_run, current)
    saved = {score_key(one): savings(one, bench_run.weights, base) for one in scores}
    refused = [RefusedFile(file=str(one.file), reason=one.reason) for one in bench_run.refused]
    credible = [*_disturbed(load), *_short(current)]
    return Summary(scores, saved, base, refused, [*_notes(bench_run), *notes, *base.notes, *credible], machine, load)


def _disturbed(load: tuple[float | None, float | None]) -> Iterator[str]:
    if any(used is not None and used > MOST_BUSY for used in load):
        yield BUSY.format(*("?" if used is None else f"{used:.1f}" for used in load))


def _short(outcomes: Sequence[Outcome]) -> Iterator[str]:
    times = [outcome.time for outcome in outcomes if outcome.time is not None]
    if short := sum((time.way_us or 0.0) > MOST_WAY * time.median_us for time in times):
        yield SHORT.format(short, len(times), MOST_WAY)


def _baseline(bench_run: BenchRun, outcomes: Sequence[Outcome]) -> tuple[Baseline, list[str]]:
    path, measurements, base = bench_run.options.measurements, bench_run.measurements, bench_run.measured
    if base is None:
        return References(), []
    if (reason := why_not_comparable(measurements, outcomes)) is not None:
        return References(), [f"{path}: {reason}: not compared"]
    different = different_caches(measurements, outcomes)
    note = [f"{path}: {different}"] if different else []
    if count := count_doubtful(outcomes, base, bench_run.weights):
        note.append(f"{path}: {SLOWER.format(count)}")
    return base, note


def _notes(bench_run: BenchRun) -> Iterator[str]:
    metadata = bench_run.subject.metadata
    recorded, model = (metadata.layers_recorded, metadata.layers_model) if metadata else (None, None)
    if recorded is not None and model is not None and recorded < model:
        yield f"recorded {recorded} of the model's {model} layers: shares are not the model's"
    if not bench_run.subject.counts:
        yield UNWEIGHED
    names = {one.solution.definition for one in bench_run.solutions}
    every, taken = _invocations(bench_run, names, chosen=False), _invocations(bench_run, names, chosen=True)
    if taken < every:
        yield f"--workloads {bench_run.options.workloads}: {taken / every:.1%} of these Definitions' counts"
    for name in sorted(name for name in names if not bench_run.workloads[name]):
        yield f"{name}: has no Workloads, so that nothing is judged on it"


def _invocations(bench_run: BenchRun, names: Iterable[str], chosen: bool) -> int:
    workloads = bench_run.workloads if chosen else bench_run.subject.workloads
    return sum(
        sum(bench_run.weights.get((name, workload.uuid), UNCOUNTED_PHASES).values())
        for name in names
        for workload in workloads.get(name, ())
    )

"""From Outcomes to a Summary: Scores, what each saves of which baseline, and what to know before believing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kcap.bench.run.bench_run import BenchRun
from kcap.bench.run.output import Machine, RefusedFile, solution_key
from kcap.bench.summary.baseline import Baseline, References, count_doubtful, measured_baseline, why_not_comparable
from kcap.bench.summary.score import Saving, Score, best_scores, savings, score_key, score_solutions, sum_savings
from kcap.replay.datasets.workloads import UNCOUNTED_PHASES
from kcap.schemas.results import measurement as measurements_file
from kcap.schemas.results.outcome import Outcome


@dataclass(frozen=True)
class Summary:
    """Scores with what each saves of the baseline. `notes`: what to know before believing them."""

    scores: Sequence[Score]
    saved: Mapping[str, Mapping[str, Saving]]
    baseline: Baseline
    refused: Sequence[RefusedFile] = ()
    notes: Sequence[str] = ()
    machine: Machine = field(default_factory=Machine)

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


def summarize(judging: BenchRun, outcomes: Iterable[Outcome], machine: Machine) -> Summary:
    """Of the Solutions that there are, over the Workloads chosen."""
    there = {(one.solution.definition, one.solution.author, one.solution.name) for one in judging.found}
    current = [outcome for outcome in outcomes if solution_key(outcome) in there]
    chosen = {name: [workload.uuid for workload in given] for name, given in judging.chosen.items()}
    scores = score_solutions(current, chosen, judging.weights)
    base, notes = _baseline(judging, current)
    saved = {score_key(one): savings(one, judging.weights, base) for one in scores}
    refused = [RefusedFile(file=str(one.file), reason=one.reason) for one in judging.refused]
    return Summary(scores, saved, base, refused, [*_notes(judging), *notes, *base.notes], machine)


def _baseline(judging: BenchRun, outcomes: Sequence[Outcome]) -> tuple[Baseline, list[str]]:
    path, subject = judging.options.measurements, judging.subject
    if path is None:
        return References(), []
    measurements = list(measurements_file.read_measurements(path))
    if (reason := why_not_comparable(measurements, outcomes)) is not None:
        return References(), [f"{path}: {reason}: not compared"]
    caches = {line.cache for line in measurements if line.cache} | {one.time.cache for one in outcomes if one.time}
    states = sorted(str(cache) for cache in caches - {None})
    note = [f"{path}: times of different cache states ({', '.join(states)}) are compared"] if len(states) > 1 else []
    base = measured_baseline(measurements, subject.counts, subject.calls)
    if count := count_doubtful(outcomes, base, judging.weights):
        note.append(f"{path}: {SLOWER.format(count)}")
    return base, note


def _notes(judging: BenchRun) -> Iterator[str]:
    metadata = judging.subject.metadata
    recorded, model = (metadata.layers_recorded, metadata.layers_model) if metadata else (None, None)
    if recorded is not None and model is not None and recorded < model:
        yield f"recorded {recorded} of the model's {model} layers: shares are not the model's"
    if not judging.subject.counts:
        yield UNWEIGHED
    names = {one.solution.definition for one in judging.found}
    every, taken = _invocations(judging, names, chosen=False), _invocations(judging, names, chosen=True)
    if taken < every:
        yield f"--workloads {judging.options.workloads}: {taken / every:.1%} of these Definitions' counts"
    for name in sorted(name for name in names if not judging.chosen[name]):
        yield f"{name}: has no Workloads, so that nothing is judged on it"


def _invocations(judging: BenchRun, names: Iterable[str], chosen: bool) -> int:
    workloads = judging.chosen if chosen else judging.subject.workloads
    return sum(
        sum(judging.weights.get((name, workload.uuid), UNCOUNTED_PHASES).values())
        for name in names
        for workload in workloads.get(name, ())
    )

"""From Outcomes to a Summary: which baseline, and what to know of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kcap.bench.judging import Judging
from kcap.bench.results.outcomes import key
from kcap.bench.results.run import Machine, RefusedFile
from kcap.bench.summary.baseline import Baseline, References
from kcap.bench.summary.doubts import comparable, doubtful
from kcap.bench.summary.measured import baseline
from kcap.bench.summary.report import Summary
from kcap.bench.summary.saving import key_of, savings
from kcap.bench.summary.score import score
from kcap.replay.definitions.source import UNCOUNTED
from kcap.schemas import measurement as measurements_file
from kcap.schemas.outcome import Outcome

SLOWER = (
    "on {} Workloads their references take less than half the time that was measured of the engine's kernels: "
    "the machine was not as it is now, believe no share"
)
UNWEIGHED = "no counts are known: each Workload counts as one invocation"


def summarize(judging: Judging, outcomes: Iterable[Outcome], machine: Machine) -> Summary:
    """Of the Solutions that there are, over the Workloads chosen."""
    there = {(one.solution.definition, one.solution.author, one.solution.name) for one in judging.found}
    current = [outcome for outcome in outcomes if key(outcome) in there]
    chosen = {name: [workload.uuid for workload in given] for name, given in judging.chosen.items()}
    scores = score(current, chosen, judging.weights)
    base, notes = _baseline(judging, current)
    saved = {key_of(one): savings(one, judging.weights, base) for one in scores}
    refused = [RefusedFile(file=str(one.file), reason=one.reason) for one in judging.refused]
    return Summary(scores, saved, base, refused, [*_notes(judging), *notes, *base.notes], machine)


def _baseline(judging: Judging, outcomes: Sequence[Outcome]) -> tuple[Baseline, list[str]]:
    path, subject = judging.options.measurements, judging.subject
    if path is None:
        return References(), []
    measurements = list(measurements_file.read(path))
    if (reason := comparable(measurements, outcomes)) is not None:
        return References(), [f"{path}: {reason}: not compared"]
    caches = {line.cache for line in measurements if line.cache} | {one.time.cache for one in outcomes if one.time}
    states = sorted(str(cache) for cache in caches - {None})
    note = [f"{path}: times of different cache states ({', '.join(states)}) are compared"] if len(states) > 1 else []
    base = baseline(measurements, subject.counts, subject.calls)
    if count := doubtful(outcomes, base, judging.weights):
        note.append(f"{path}: {SLOWER.format(count)}")
    return base, note


def _notes(judging: Judging) -> Iterator[str]:
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


def _invocations(judging: Judging, names: Iterable[str], chosen: bool) -> int:
    workloads = judging.chosen if chosen else judging.subject.workloads
    return sum(
        sum(judging.weights.get((name, workload.uuid), UNCOUNTED).values())
        for name in names
        for workload in workloads.get(name, ())
    )

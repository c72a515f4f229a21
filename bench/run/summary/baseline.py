"""What a Workload took before: by its reference, or by the engine's own kernels as `kcap replay` timed them.

And whether those times and the judge's can be set against each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kcap.errors import CallError
from kcap.replay.datasets.workloads import UNCOUNTED_PHASES, WorkloadWeights, workload_weights
from kcap.schemas.flashinfer.dataset import WorkloadCount
from kcap.schemas.recording.phases import ALL_PHASES
from kcap.schemas.recording.records import Call
from kcap.schemas.recording.signature import call_key
from kcap.schemas.results.measurement import Measurement, mean_us, on_the_device
from kcap.schemas.results.outcome import Outcome

WorkloadKey: TypeAlias = tuple[str, str]  # a Definition and a Workload of it
Times: TypeAlias = "Mapping[str, float]"  # microseconds by phase


class Baseline(ABC):
    """What time is saved of. `totals`: the whole, by phase; empty where it is not known."""

    title: str
    totals: Times
    notes: Sequence[str] = ()

    @abstractmethod
    def before(self, outcome: Outcome, counts: Mapping[str, int]) -> Times:
        """Microseconds by phase of the Workload's `counts` invocations; none where that is not known."""


class References(Baseline):
    """Each Workload's reference, timed beside the Solution."""

    title = "the references"
    totals: Times = {}

    def before(self, outcome: Outcome, counts: Mapping[str, int]) -> Times:
        reference = outcome.reference
        return {phase: n * reference.median_us for phase, n in counts.items()} if reference else {}


@dataclass(frozen=True)
class Measured(Baseline):
    """Times of `kcap replay`, by Definition and Workload."""

    title: str
    times: Mapping[WorkloadKey, Times]
    totals: Times
    notes: Sequence[str] = ()

    def before(self, outcome: Outcome, counts: Mapping[str, int]) -> Times:
        return self.times.get((outcome.definition, outcome.workload), {})


Timed: TypeAlias = "Sequence[Measurement]"  # of one Call or Workload, which has several where its Samples differ


def measured_baseline(
    measurements: Sequence[Measurement], counts: Sequence[WorkloadCount], calls: Sequence[Call]
) -> Measured:
    """Of `measurements` of a Recording's Calls, or of a dataset's Workloads. `calls`: the Recording's, if there is one.

    CallError for measurements of other Calls than `calls`.
    """
    lines = on_the_device(measurements)
    by_call: dict[int, list[Measurement]] = defaultdict(list)
    by_workload: dict[WorkloadKey, list[Measurement]] = defaultdict(list)
    call_id, by_id = _numbers(calls), {call.id: call for call in calls}
    for line in lines:
        if line.definition is not None and line.workload is not None:
            by_workload[line.definition, line.workload].append(line)
        elif (call := call_id(line)) is not None:
            by_call[call].append(_with_counts(line, by_id.get(call)))
    return _of_calls(by_call, counts) if by_call else _of_workloads(by_workload, workload_weights(counts))


def _numbers(calls: Sequence[Call]) -> Callable[[Measurement], int | None]:
    """The id of a measured Call: told by its key, which is the same in any Recording. Without `calls` its own id."""
    ids: dict[str, list[int]] = defaultdict(list)
    for call in calls:
        ids[call_key(call)].append(call.id)

    def call_id(line: Measurement) -> int | None:
        if not calls or line.call in ids[line.key]:
            return line.call
        if not ids[line.key]:
            raise CallError(
                f"--measurements: {line.operator} (key {line.key}) is no call of PATH: of which one are they?"
            )
        return ids[line.key][0]

    return call_id


def _with_counts(line: Measurement, call: Call | None) -> Measurement:
    """With the counts that it lacks (those of older versions do), where all phases of `call` were replayed."""
    if line.counts or call is None or line.count != call.total:
        return line
    return line.model_copy(update={"counts": {count.phase: call.counted(count.phase) for count in call.counts}})


def measurements_of(
    measurements: Iterable[Measurement], counts: Sequence[WorkloadCount], calls: Sequence[Call]
) -> list[Measurement]:
    """Those of the Calls or the Workloads that `counts` name, under the ids that Calls have in `calls`."""
    call_id, wanted = _numbers(calls), {count.call for count in counts}
    workloads = {(count.definition, count.workload) for count in counts}
    chosen = []
    for line in measurements:
        if line.workload is not None:
            chosen += [line] if (line.definition, line.workload) in workloads else []
        elif (call := call_id(line)) in wanted:
            chosen.append(line.model_copy(update={"call": call}))
    return chosen


def _of_calls(timed: Mapping[int, Timed], counts: Sequence[WorkloadCount]) -> Measured:
    """A phase that was not replayed (`kcap replay --phase`) is neither in the times nor in the totals."""
    by_call: dict[tuple[str, str, int], list[WorkloadCount]] = defaultdict(list)
    for count in counts:
        by_call[count.definition, count.operator, count.call].append(count)
    times: dict[WorkloadKey, Counter[str]] = defaultdict(Counter)
    incomplete = set()
    for (_, _, call), held in by_call.items():
        for of, phases in workload_weights(held).items():
            of_call = timed.get(call, ())
            replayed = (of_call[0].counts if of_call else None) or phases
            times_by_phase = _times(of_call, phases)
            times[of].update(times_by_phase)
            if any(n and phase in replayed and phase not in times_by_phase for phase, n in phases.items()):
                incomplete.add(of)
    totals, untimed = _totals(timed)
    whole = {of: dict(phases) for of, phases in times.items() if of not in incomplete}
    return Measured("the engine's kernels", whole, totals, _notes(untimed, len(incomplete)))


def _of_workloads(timed: Mapping[WorkloadKey, Timed], weights: WorkloadWeights) -> Measured:
    times = {of: _times(timed_workload, weights.get(of, UNCOUNTED_PHASES)) for of, timed_workload in timed.items()}
    totals: Counter[str] = Counter()
    for phases in times.values():
        totals.update(phases)
    return Measured(
        "the references as measured",
        times,
        totals,
        _notes(sum(not timed_workload for timed_workload in times.values()), 0),
    )


def _times(timed: Timed, counts: Mapping[str, int]) -> dict[str, float]:
    us_by_phase = {phase: mean_us(timed, phase) for phase in counts}
    return {phase: counts[phase] * us for phase, us in us_by_phase.items() if us is not None}


def _totals(timed: Mapping[int, Timed]) -> tuple[Times, int]:
    """Microseconds by phase of all Calls that were measured, and how many of them have no time.

    Where a Call's counts are not known by phase, all of it is under `all`.
    """
    totals: Counter[str] = Counter()
    for of_call in timed.values():
        counts = {str(phase): n for phase, n in of_call[0].counts.items()} or {ALL_PHASES: of_call[0].count}
        totals.update(_times(of_call, counts))
    return totals, sum(all(line.median_us is None for line in of_call) for of_call in timed.values())


def _notes(untimed: int, incomplete: int) -> list[str]:
    notes = [f"{untimed} measured calls have no time: the total is that of the others"] if untimed else []
    incomplete_note = f"{incomplete} Workloads stand for calls that were not measured: nothing is saved on them"
    return notes + ([incomplete_note] if incomplete else [])


SUSPECT = 2  # times that an engine's kernel may take its reference's time


def why_not_comparable(measurements: Iterable[Measurement], outcomes: Iterable[Outcome]) -> str | None:
    """Why times of one cannot be set against times of the other; None if they can."""
    measured = {_machine(line) for line in measurements if line.median_us is not None and line.device_name}
    judged = {_machine(outcome) for outcome in outcomes if outcome.time is not None and outcome.device_name}
    if measured and judged and not judged & measured:
        return f"measured on {', '.join(sorted(measured))}, judged on {', '.join(sorted(judged))}"
    return None


def different_caches(measurements: Iterable[Measurement], outcomes: Iterable[Outcome]) -> str:
    """What is to be said where times of one and of the other are of different states of the caches; else "". On a GPU
    `kcap replay --cache` chooses the state; on a CPU the judge's inputs are always cold, and replay's warm.
    """
    states = {line.cache for line in measurements} | {outcome.time.cache for outcome in outcomes if outcome.time}
    told = sorted(str(state) for state in states if state)
    return f"times of different cache states ({', '.join(told)}) are compared" if len(told) > 1 else ""


def _machine(line: Measurement | Outcome) -> str:
    return line.device_name + (f" with {line.threads} threads (--threads)" if line.threads else "")


def count_doubtful(outcomes: Iterable[Outcome], base: Measured, weights: WorkloadWeights) -> int:
    """Workloads whose plain reference takes less than half of what the engine's kernels were measured at."""
    doubtful = 0
    for outcome in outcomes:
        before = base.times.get((outcome.definition, outcome.workload), {})
        counts = weights.get((outcome.definition, outcome.workload), UNCOUNTED_PHASES)
        reference = sum(counts.get(phase, 0) for phase in before) * (
            outcome.reference.median_us if outcome.reference else 0
        )
        doubtful += 0 < SUSPECT * reference < sum(before.values())
    return doubtful

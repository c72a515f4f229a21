"""What `kcap bench` judged, for a report: each Solution on each Workload, and what was caught and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kcap.errors import CallError
from kcap.schemas.files.jsonfile import read_json
from kcap.schemas.results.bench_run import RUN_ADAPTER, RUN_FILE, RunRecord
from kcap.schemas.results.outcome import REFERENCE_CHECKS_FILE, Outcome, read_outcomes, read_reference_checks

OUTCOMES_FILE, DATASET = "outcomes.jsonl", "dataset"
MOST_LOG = 2000  # characters of what a Solution printed


@dataclass(frozen=True)
class JudgedWorkload:
    """One Solution on one Workload. Microseconds of one invocation; `floor_us`: what the machine cannot go below."""

    workload: str
    status: str
    us: float | None
    reference_us: float | None
    floor_us: float | None
    count: int | None
    error: float | None
    reason: str
    log: str


@dataclass(frozen=True)
class JudgedSolution:
    """`geometric_mean` and `weighted`, speedups over the reference, are None unless it passed on every Workload."""

    definition: str
    name: str
    passed: int
    geometric_mean: float | None
    weighted: float | None
    workloads: list[JudgedWorkload]


@dataclass(frozen=True)
class Judged:
    """`references`, by Definition: `verified`, or `differs` from what was recorded. `refused`: files and why."""

    machine: str
    solutions: list[JudgedSolution]
    references: dict[str, str]
    refused: list[str]


def read_judged(folder: Path) -> Judged:
    """What lies in `folder`, which `kcap bench` wrote; CallError for any other. Needs torch."""
    from kcap.bench.run.summary.report import title
    from kcap.bench.run.summary.score import score_solutions

    if not (folder / RUN_FILE).is_file():
        raise CallError(f"{folder}: no output of kcap bench, which writes {RUN_FILE} there")
    run: RunRecord = read_json(folder / RUN_FILE, RUN_ADAPTER)
    path = folder / OUTCOMES_FILE
    outcomes = list(read_outcomes(path)) if path.is_file() else []
    workloads: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.workload not in workloads[outcome.definition]:
            workloads[outcome.definition].append(outcome.workload)
    weights = {(one.definition, one.workload): Counter({"other": one.count or 1}) for one in outcomes}
    solutions = [
        JudgedSolution(
            score.definition,
            score.name,
            len(score.passed),
            score.geometric_mean,
            score.weighted,
            [_workload(outcome) for outcome in score.outcomes.values()],
        )
        for score in score_solutions(outcomes, workloads, weights)
    ]
    refused = [f"{refused.file}: {refused.reason}" for refused in run.refused]
    return Judged(title(run.machine), solutions, _references(folder / DATASET / REFERENCE_CHECKS_FILE), refused)


def _workload(outcome: Outcome) -> JudgedWorkload:
    return JudgedWorkload(
        outcome.workload,
        outcome.status,
        outcome.time.median_us if outcome.time else None,
        outcome.reference.median_us if outcome.reference else None,
        outcome.floor_us,
        outcome.count,
        outcome.accuracy.error if outcome.accuracy else None,
        _reason(outcome),
        outcome.log[-MOST_LOG:],
    )


def _reason(outcome: Outcome) -> str:
    from kcap.bench.run.summary.report import describe_wrong

    wrong = [describe_wrong(wrong) for wrong in outcome.wrong]
    return "; ".join([*filter(None, [outcome.reason]), *wrong])


def _references(checks: Path) -> dict[str, str]:
    """Of each Definition that was checked: `verified` if every line that is not skipped agrees."""
    statuses: dict[str, list[str]] = defaultdict(list)
    for check in read_reference_checks(checks) if checks.is_file() else ():
        if check.status != "skipped":
            statuses[check.definition].append(check.status)
    return {name: _verdict(of_definition) for name, of_definition in statuses.items()}


def _verdict(statuses: Sequence[str]) -> str:
    if all(status == "agrees" for status in statuses):
        return "verified"
    return "differs" if "differs" in statuses else "unverified"

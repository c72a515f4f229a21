"""Whether times of `kcap replay` and of the judge can be set against each other."""

from __future__ import annotations

from collections.abc import Iterable

from kcap.bench.summary.baseline import Measured
from kcap.replay.definitions.source import UNCOUNTED, Weights
from kcap.schemas.measurement import Measurement
from kcap.schemas.outcome import Outcome

SUSPECT = 2  # times that an engine's kernel may take its reference's time


def comparable(measurements: Iterable[Measurement], outcomes: Iterable[Outcome]) -> str | None:
    """Why times of one cannot be set against times of the other; None if they can."""
    measured = {_machine(line) for line in measurements if line.median_us is not None and line.device_name}
    judged = {_machine(outcome) for outcome in outcomes if outcome.time is not None and outcome.device_name}
    if measured and judged and not judged & measured:
        return f"measured on {', '.join(sorted(measured))}, judged on {', '.join(sorted(judged))}"
    return None


def _machine(line: Measurement | Outcome) -> str:
    return line.device_name + (f" with {line.threads} threads (--threads)" if line.threads else "")


def doubtful(outcomes: Iterable[Outcome], base: Measured, weights: Weights) -> int:
    """Workloads whose plain reference takes less than half of what the engine's kernels were measured at."""
    found = 0
    for outcome in outcomes:
        before = base.times.get((outcome.definition, outcome.workload), {})
        counts = weights.get((outcome.definition, outcome.workload), UNCOUNTED)
        reference = sum(counts.get(phase, 0) for phase in before) * (
            outcome.reference.median_us if outcome.reference else 0
        )
        found += 0 < SUSPECT * reference < sum(before.values())
    return found

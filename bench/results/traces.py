"""Outcomes as FlashInfer-Bench's Traces: `traces/<author>/<op_type>/<definition>.jsonl`.

Source: FlashInfer-Bench 0.1.2, `data/trace.py`, `data/trace_set.py`. What its statuses lack is a RUNTIME_ERROR, whose
log tells the reason. What was not judged, for a fault that is not the Solution's, is left out.
"""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from kcap import __version__
from kcap.schemas import trace as traces_file
from kcap.schemas.dataset import with_folder
from kcap.schemas.definition import Definition
from kcap.schemas.outcome import Outcome
from kcap.schemas.trace import STATUSES, Correctness, Environment, Evaluation, EvaluationStatus, Performance, Trace
from kcap.schemas.workload import Workload

FOLDER = "traces"
UNKNOWN_AUTHOR = "unknown"


def write(
    output: Path,
    outcomes: Iterable[Outcome],
    definitions: Mapping[str, Definition],
    workloads: Mapping[str, Sequence[Workload]],
) -> None:
    """Write the Traces of `outcomes`; what an earlier run wrote goes."""
    files: dict[PurePosixPath, list[Trace]] = defaultdict(list)
    known = {(name, one.uuid): one for name, given in workloads.items() for one in given}
    for outcome in outcomes:
        definition, workload = definitions.get(outcome.definition), known.get((outcome.definition, outcome.workload))
        if definition is not None and workload is not None and outcome.status != "NOT_JUDGED":
            author = outcome.author or UNKNOWN_AUTHOR
            path = PurePosixPath(FOLDER, author, definition.op_type, f"{definition.name}.jsonl")
            files[path].append(trace_of(outcome, workload))
    shutil.rmtree(output / FOLDER, ignore_errors=True)
    for path, traces in files.items():
        traces_file.write(with_folder(output / path), sorted(traces, key=_place))


def trace_of(outcome: Outcome, workload: Workload) -> Trace:
    return Trace(
        definition=outcome.definition,
        solution=outcome.solution,
        workload=workload,
        evaluation=evaluation_of(outcome),
    )


def evaluation_of(outcome: Outcome) -> Evaluation:
    """`outcome` as an Evaluation: latencies in milliseconds; an error that is not known is NaN."""
    status: EvaluationStatus = outcome.status if outcome.status in STATUSES else "RUNTIME_ERROR"
    libs = {"torch": outcome.torch, "kcap": __version__, "driver": outcome.driver or ""}
    return Evaluation(
        status=status,
        environment=Environment(
            hardware=outcome.device_name or outcome.device, libs={name: one for name, one in libs.items() if one}
        ),
        timestamp=outcome.timestamp or "unknown",
        log=_log(outcome, status),
        correctness=_correctness(outcome) if status in ("PASSED", "INCORRECT_NUMERICAL") else None,
        performance=_performance(outcome) if status == "PASSED" else None,
    )


def _log(outcome: Outcome, status: str) -> str:
    name = "" if outcome.status == status else f"{outcome.status}: "
    return "\n".join(part for part in (f"{name}{outcome.reason or ''}", outcome.log) if part)


def _correctness(outcome: Outcome) -> Correctness:
    accuracy = outcome.accuracy
    if accuracy is None:
        return Correctness(max_relative_error=math.nan, max_absolute_error=math.nan)
    extra = {"error": accuracy.error if math.isfinite(accuracy.error) else str(accuracy.error)}
    told = {"allowed": accuracy.allowed, "truth": accuracy.truth, "compared": accuracy.compared}
    return Correctness(
        max_relative_error=accuracy.max_relative_error,
        max_absolute_error=accuracy.max_absolute_error,
        extra={**extra, **told},
    )


def _performance(outcome: Outcome) -> Performance:
    """Zero stands for what was not measured, as in FlashInfer-Bench."""
    return Performance(
        latency_ms=outcome.time.median_us / 1e3 if outcome.time else 0.0,
        reference_latency_ms=outcome.reference.median_us / 1e3 if outcome.reference else 0.0,
        speedup_factor=outcome.speedup or 0.0,
    )


def _place(trace: Trace) -> tuple[str, str]:
    return trace.solution or "", trace.workload.uuid

"""Outcomes in the formats of others: FlashInfer-Bench's Traces with the Solutions, and the older benchmark results.

`solutions/<author>/<op_type>/<definition>/<name>.json`: what was judged, whatever form it was read in; a Trace refers
to it by name.

`traces/<author>/<op_type>/<definition>.jsonl`: source FlashInfer-Bench 0.1.2, `data/trace.py`, `data/trace_set.py`. A
status that it lacks becomes RUNTIME_ERROR, and the log has the reason. NOT_JUDGED is left out.

`results/<definition>/<author>/<solution>/<workload>.json`: of one kernel that ran or did not compile; Outcomes that are
neither PASSED nor COMPILE_ERROR have none.
"""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from kcap.schemas.flashinfer import benchmark_result
from kcap.schemas.flashinfer import solution as solutions_file
from kcap.schemas.flashinfer import trace as traces_file
from kcap.schemas.flashinfer.benchmark_result import BenchmarkResult, CompilationFailure, Device, Success
from kcap.schemas.flashinfer.dataset import with_folder
from kcap.schemas.flashinfer.definition import Definition, Workload
from kcap.schemas.flashinfer.solution import Solution
from kcap.schemas.flashinfer.trace import (
    STATUSES,
    Correctness,
    Environment,
    Evaluation,
    EvaluationStatus,
    Performance,
    Trace,
)
from kcap.schemas.results.outcome import Outcome
from kcap.version import __version__

SOLUTIONS_FOLDER = "solutions"
TRACES_FOLDER = "traces"
UNKNOWN_AUTHOR = "unknown"


def write_traces(
    output: Path,
    outcomes: Iterable[Outcome],
    definitions: Mapping[str, Definition],
    workloads: Mapping[str, Sequence[Workload]],
) -> None:
    """Write the Traces of `outcomes`; what an earlier run wrote goes."""
    files: dict[PurePosixPath, list[Trace]] = defaultdict(list)
    by_key = {(name, workload.uuid): workload for name, listed in workloads.items() for workload in listed}
    for outcome in outcomes:
        definition, workload = definitions.get(outcome.definition), by_key.get((outcome.definition, outcome.workload))
        if definition is not None and workload is not None and outcome.status != "NOT_JUDGED":
            author = outcome.author or UNKNOWN_AUTHOR
            path = PurePosixPath(TRACES_FOLDER, author, definition.op_type, f"{definition.name}.jsonl")
            files[path].append(trace_of(outcome, workload))
    shutil.rmtree(output / TRACES_FOLDER, ignore_errors=True)
    for path, traces in files.items():
        traces_file.write(with_folder(output / path), sorted(traces, key=_place))


def write_solutions(output: Path, solutions: Iterable[Solution], definitions: Mapping[str, Definition]) -> None:
    """Write `solutions` beside those that an earlier run of the same output judged."""
    for solution in solutions:
        folder = output / SOLUTIONS_FOLDER / solution.author / definitions[solution.definition].op_type
        solutions_file.write(with_folder(folder / solution.definition / f"{solution.name}.json"), solution)


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
            hardware=outcome.device_name or outcome.device,
            libs={name: version for name, version in libs.items() if version},
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
    comparison = {"allowed": accuracy.allowed, "truth": accuracy.truth, "compared": accuracy.compared}
    return Correctness(
        max_relative_error=accuracy.max_relative_error,
        max_absolute_error=accuracy.max_absolute_error,
        extra={**extra, **comparison},
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


RESULTS_FOLDER = "results"


def write_benchmark_results(output: Path, outcomes: Iterable[Outcome]) -> None:
    """Write those that the form can hold; what an earlier run wrote goes."""
    shutil.rmtree(output / RESULTS_FOLDER, ignore_errors=True)
    for outcome in outcomes:
        if (result := result_of(outcome)) is not None:
            folder = (
                output / RESULTS_FOLDER / outcome.definition / (outcome.author or UNKNOWN_AUTHOR) / outcome.solution
            )
            benchmark_result.write(with_folder(folder / f"{outcome.workload}.json"), result)


def result_of(outcome: Outcome) -> BenchmarkResult | None:
    """`kernel_id` is the Definition, `source` the Solution; `time` in milliseconds. None: the form has no place."""
    device = Device(name=outcome.device_name or outcome.device)
    if outcome.status == "COMPILE_ERROR":
        words = "\n".join(filter(None, (outcome.reason, outcome.log)))
        return CompilationFailure(
            device=device, kernel_id=outcome.definition, source=outcome.solution, compile_error=words
        )
    if outcome.status != "PASSED" or outcome.time is None:
        return None
    error = outcome.accuracy.max_absolute_error if outcome.accuracy else math.nan
    return Success(
        device=device,
        kernel_id=outcome.definition,
        source=outcome.solution,
        time=outcome.time.median_us / 1e3,
        speedup=outcome.speedup,
        max_diff=error if math.isfinite(error) else None,
    )

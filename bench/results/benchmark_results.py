"""Outcomes in the older benchmark-result form, `results/<definition>/<author>/<solution>/<workload>.json`.

The form is of one kernel that ran or did not compile: Outcomes that are neither PASSED nor COMPILE_ERROR have none.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable
from pathlib import Path

from kcap.bench.results.traces import UNKNOWN_AUTHOR
from kcap.schemas import benchmark_result
from kcap.schemas.benchmark_result import BenchmarkResult, CompilationFailure, Device, Success
from kcap.schemas.dataset import with_folder
from kcap.schemas.outcome import Outcome

FOLDER = "results"


def write(output: Path, outcomes: Iterable[Outcome]) -> None:
    """Write those that the form can hold; what an earlier run wrote goes."""
    shutil.rmtree(output / FOLDER, ignore_errors=True)
    for outcome in outcomes:
        if (result := result_of(outcome)) is not None:
            folder = output / FOLDER / outcome.definition / (outcome.author or UNKNOWN_AUTHOR) / outcome.solution
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

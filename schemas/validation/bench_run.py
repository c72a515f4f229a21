"""The folder of a `kcap bench` run: its record, each Outcome, and the same in the formats of others."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter

from kcap.schemas.flashinfer import benchmark_result
from kcap.schemas.flashinfer.dataset import files
from kcap.schemas.flashinfer.trace import Trace
from kcap.schemas.results.bench_run import RUN_ADAPTER, RUN_FILE
from kcap.schemas.results.outcome import Outcome
from kcap.schemas.validation.dataset import check_dataset
from kcap.schemas.validation.report import Report

OUTCOMES, TRACES = TypeAdapter(Outcome), TypeAdapter(Trace)


def check_bench_run(report: Report, root: Path) -> None:
    """Everything that the run wrote. A run that was interrupted is valid: `--resume` finishes it."""
    record = report.document(root / RUN_FILE, RUN_ADAPTER)
    outcomes = root / "outcomes.jsonl"
    for place, outcome in report.lines(outcomes, OUTCOMES) if outcomes.is_file() else ():
        key = f"{outcome.definition}/{outcome.author}/{outcome.solution}"
        if record is not None and key not in record.solutions:
            report.error(place, f"solution: {RUN_FILE} names no {key}")
    for path in files(root / "traces", "jsonl"):
        for _ in report.lines(path, TRACES):
            pass
    for path in files(root / "results", "json"):
        report.document(path, benchmark_result.ADAPTER)
    if (root / "dataset").is_dir():  # of a Recording: the Definitions that were judged
        check_dataset(report, root / "dataset")

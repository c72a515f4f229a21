"""The folder of a task: what it says, the engine's times, and the dataset that is judged on."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter

from kcap.schemas.results.measurement import Measurement
from kcap.schemas.results.task import TASK_ADAPTER, TASK_FILE
from kcap.schemas.validation.dataset import check_dataset
from kcap.schemas.validation.report import Report

MEASUREMENTS = TypeAdapter(Measurement)


def check_task(report: Report, root: Path) -> None:
    """What `kcap task` wrote and `kcap judge` reads; the Solution in it is for the judge."""
    report.document(root / TASK_FILE, TASK_ADAPTER)
    times = root / "measurements.jsonl"
    for _ in report.lines(times, MEASUREMENTS) if times.is_file() else ():
        pass
    check_dataset(report, root / "dataset")

"""Every format that kcap knows: how it is checked, and how a file or directory of it is detected by its content.

One entry of FORMATS is one format. Adding one is adding an entry.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, TypeAdapter

from kcap.errors import CallError, FormatError
from kcap.schemas.backendbench import Loss, Problems
from kcap.schemas.flashinfer import (
    agent_trace,
    benchmark_result,
    calling_record,
    definition,
    kernel_description,
    solution,
)
from kcap.schemas.flashinfer.dataset import WorkloadCount
from kcap.schemas.flashinfer.definition import check_definition
from kcap.schemas.flashinfer.kernel_description import check_kernel_description
from kcap.schemas.flashinfer.trace import Trace
from kcap.schemas.recording.recording import refuse_formatless
from kcap.schemas.recording.records import Call, Metadata, Program, Request, Sample, Step
from kcap.schemas.recording.turns import Turn
from kcap.schemas.results.applied import APPLIED_ADAPTER, Applied
from kcap.schemas.results.bench_run import RUN_ADAPTER, RUN_FILE, RunRecord
from kcap.schemas.results.coverage import StepCoverage
from kcap.schemas.results.export_loss import ExportLoss
from kcap.schemas.results.measurement import Measurement, ProgramMeasurement
from kcap.schemas.results.outcome import Outcome, ReferenceCheck
from kcap.schemas.results.plan import PLAN_ADAPTER, Plan
from kcap.schemas.results.task import HELD_OUT_ADAPTER, TASK_ADAPTER, TASK_FILE, HeldOutSet, Task
from kcap.schemas.results.verdict import VERDICT_ADAPTER, Verdict
from kcap.schemas.validation.bench_run import check_bench_run
from kcap.schemas.validation.dataset import check_dataset
from kcap.schemas.validation.recording import check_recording, check_trace_file
from kcap.schemas.validation.report import Report
from kcap.schemas.validation.task import check_task

T = TypeVar("T")
Check = Callable[[Report, Path], None]


@dataclass(frozen=True)
class Format:
    """A format: its check, the keys that its JSON objects have, and the type that describes them (None: no JSON)."""

    title: str
    check: Check
    keys: frozenset[str] = frozenset()
    adapter: TypeAdapter[Any] | None = None


def _keys(*models: type[BaseModel]) -> frozenset[str]:
    return frozenset(key for model in models for key in model.model_fields)


def _nothing(document: Any) -> list[str]:
    return []


def _document(
    title: str,
    adapter: TypeAdapter[T],
    keys: frozenset[str],
    advise: Callable[[T], list[str]],
    refuse: Callable[[T], list[str]] = _nothing,
) -> Format:
    def check(report: Report, path: Path) -> None:
        if (document := report.document(path, adapter)) is not None:
            report.error(path, *refuse(document))
            report.warn(path, *advise(document))

    return Format(title, check, keys, adapter)


def _lines(
    title: str,
    model: type[BaseModel],
    keys: frozenset[str] | None = None,
    refuse: Callable[[Any], list[str]] = _nothing,
) -> Format:
    adapter = TypeAdapter(model)

    def check(report: Report, path: Path) -> None:
        for place, document in report.lines(path, adapter):
            report.error(place, *refuse(document))

    return Format(title, check, keys or _keys(model), adapter)


def _is_workload(trace: Trace) -> list[str]:
    return [] if trace.is_workload else ["solution, evaluation: must be null in a Workload's line"]


def _check_parquet(report: Report, path: Path) -> None:
    try:
        from kcap.schemas.backendbench.table import read_table

        problems = Problems()
        for _ in read_table(path, problems):
            pass
    except ImportError:
        raise CallError(f"{path}: a parquet file is read with pyarrow: pip install pyarrow") from None
    except FormatError as error:
        return report.add(error)
    report.skipped(path, problems)


FORMATS: dict[str, Format] = {
    "recording": Format("a Recording", check_recording),
    "recording-metadata": _document(
        "a Recording's metadata", TypeAdapter(Metadata), _keys(Metadata), _nothing, refuse_formatless
    ),
    "recording-call": _lines("a Recording's Calls, one a line", Call),
    "recording-program": _lines("a Recording's Programs, one a line", Program),
    "recording-step": _lines("a Recording's Steps, one a line", Step),
    "recording-request": _lines("a Recording's requests, one a line", Request),
    "recording-turn": _lines("a Recording's turns, one a line", Turn),
    "recording-sample": _lines("a Recording's Samples, one a line", Sample),
    "dataset": Format("a FlashInfer-Bench dataset", check_dataset),
    "definition": _document(
        "a FlashInfer-Bench Definition", definition.ADAPTER, _keys(definition.Definition), check_definition
    ),
    "workload": _lines(
        "FlashInfer-Bench Workloads, one a line", Trace, frozenset({"definition", "workload"}), _is_workload
    ),
    "trace": _lines("FlashInfer-Bench Traces, one a line", Trace),
    "solution": _document("a FlashInfer-Bench Solution", solution.ADAPTER, _keys(solution.Solution), _nothing),
    "kernel-description": _document(
        "a Kernel Description of the FlashInfer schema set",
        kernel_description.ADAPTER,
        _keys(kernel_description.KernelDescription) | kernel_description.OTHER_NAMES.keys(),
        check_kernel_description,
    ),
    "calling-record": _document(
        "a kernel calling record", calling_record.ADAPTER, _keys(calling_record.CallingRecord), _nothing
    ),
    "benchmark-result": _document(
        "a benchmark result",
        benchmark_result.ADAPTER,
        _keys(benchmark_result.Success, benchmark_result.CompilationFailure),
        _nothing,
    ),
    "agent-trace": _document("an agent trace", agent_trace.ADAPTER, _keys(agent_trace.Conversation), _nothing),
    "measurement": _lines("measurements, one a line", Measurement),
    "program-measurement": _lines("measurements of Programs, one a line", ProgramMeasurement),
    "bench-run": Format("a run of kcap bench", check_bench_run),
    "applied": _document("what kcap ab measured of plans", APPLIED_ADAPTER, _keys(Applied), _nothing),
    "plan": _document("a plan of kcap apply", PLAN_ADAPTER, _keys(Plan), _nothing),
    "bench-record": _document("what a run of kcap bench judged", RUN_ADAPTER, _keys(RunRecord), _nothing),
    "outcome": _lines("Outcomes of kcap bench, one a line", Outcome),
    "task-folder": Format("a task", check_task),
    "task": _document("what a task says", TASK_ADAPTER, _keys(Task), _nothing),
    "held-out": _document("what a task's held-out Workloads are of", HELD_OUT_ADAPTER, _keys(HeldOutSet), _nothing),
    "verdict": _document("what kcap judge says of a Solution", VERDICT_ADAPTER, _keys(Verdict), _nothing),
    "coverage": _lines("profiled steps, one a line", StepCoverage),
    "counts": _lines("counts of Workloads, one a line", WorkloadCount),
    "reference-check": _lines("checks of references, one a line", ReferenceCheck),
    "export-loss": _document("what an export lost", TypeAdapter(ExportLoss), _keys(ExportLoss), _nothing),
    "trace-loss": _document("what a trace file lost", TypeAdapter(Loss), _keys(Loss), _nothing),
    "trace-file": Format("a BackendBench trace file", check_trace_file),
    "parquet": Format("BackendBench's parquet", _check_parquet),
}

HEAD = 1 << 16  # bytes that a format is detected by
TRACE_LINE = re.compile(rb"^\s*(Operator:|cnt:)", re.MULTILINE)
KEY = re.compile(rb'"(\w+)"\s*:')
PARQUET = b"PAR1"
BLANKS = b"\xef\xbb\xbf \t\r\n"  # and the byte order mark


def detect_format(path: Path) -> str | None:
    """The format of `path`, a key of FORMATS; None if it has none."""
    if path.is_dir():
        return _of_folder(path)
    with path.open("rb") as file:
        head = file.read(HEAD)
    if head.startswith(PARQUET):
        return "parquet"
    if not head.lstrip(BLANKS).startswith((b"{", b"[")):
        return "trace-file" if TRACE_LINE.search(head) else None
    document = _first(path)
    if isinstance(document, dict):
        return _closest({key for key, value in document.items() if value is not None})
    is_list = isinstance(document, list) or head.lstrip(BLANKS).startswith(b"[")
    return "agent-trace" if is_list else _closest({key.decode() for key in KEY.findall(head)})


def _of_folder(path: Path) -> str | None:
    if (path / "recording.json").exists():
        return "recording"
    if (path / RUN_FILE).exists():
        return "bench-run"
    if (path / TASK_FILE).exists():
        return "task-folder"
    return "dataset" if (path / "definitions").is_dir() else None


def _first(path: Path) -> Any:
    """The document in the first line of `path`, or in the whole of it; None where it is no JSON."""
    with path.open("rb") as file:
        for content in (file.readline, file.read):
            try:
                file.seek(0)
                return orjson.loads(content())
            except orjson.JSONDecodeError:
                continue
    return None


def _closest(keys: set[str]) -> str | None:
    """The format that has most of `keys`, and of those the one with the fewest more."""

    def likeness(name: str) -> tuple[int, int]:
        expected = FORMATS[name].keys
        return len(expected & keys), -len(expected - keys)

    name = max((name for name, entry in FORMATS.items() if entry.keys), key=likeness)
    return name if FORMATS[name].keys & keys else None

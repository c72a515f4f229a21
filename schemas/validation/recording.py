"""A Recording's files: each line, what they name in each other, and the files that they name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from kcap.errors import FormatError
from kcap.schemas import backendbench
from kcap.schemas.flashinfer import calling_record
from kcap.schemas.recording.recording import Call, Launch, Program, Recording, Request, Sample, Step, load
from kcap.schemas.recording.turns import Turn
from kcap.schemas.results import coverage
from kcap.schemas.validation.report import Report

T = TypeVar("T")
Numbered = TypeVar("Numbered", Call, Program)
CALLS, PROGRAMS = TypeAdapter(Call), TypeAdapter(Program)
STEPS, REQUESTS, SAMPLES, TURNS = TypeAdapter(Step), TypeAdapter(Request), TypeAdapter(Sample), TypeAdapter(Turn)


def check_recording(report: Report, root: Path) -> None:
    """Everything in the Recording `root`. Files beside its own are left alone."""
    try:
        recording = load(root)
    except FormatError as error:
        return report.add(error)
    calls = _table(report, root, "calls", CALLS)
    programs = _table(report, root, "programs", PROGRAMS)
    _numbered(report, calls)
    _numbered(report, programs)
    for place, program in programs:
        report.error(place, *calls.unknown("calls", "a Call", program.calls))
        report.error(place, *programs.unknown("graphs", "a Program", [graph for _, graph in program.graphs]))
    steps, turns = _table(report, root, "steps", STEPS), _table(report, root, "turns", TURNS, optional=True)
    named = any(record.requests for _, record in (*steps, *turns))
    requests = _table(report, root, "requests", REQUESTS, optional=not named)
    for place, step in steps:
        report.error(place, *programs.unknown("program", "a Program", [step.program]))
        report.error(place, *requests.unknown("requests", "a Request", step.requests))
    for place, turn in turns:
        report.error(place, *requests.unknown("requests", "a Request", turn.requests))
        report.error(place, *turns.unknown("parent", "a Turn", [turn.parent]))
    for place, sample in _table(report, root, "samples", SAMPLES):
        report.error(place, *calls.unknown("call", "a Call", [sample.call]))
        report.error(place, *_values(recording, sample))
    if not (root / "values").is_dir():
        report.warn(root / "values", "missing: replay draws the integers whose values were sampled")
    for place, call in calls:
        report.error(place, *_source(recording, call))
    _derived(report, root)


@dataclass(frozen=True)
class Table(Generic[T]):
    """`lines`: of each its place and its record, none of a line that is wrong; None where the file cannot be read."""

    lines: list[tuple[str, list[T]]] | None

    def __iter__(self) -> Iterator[tuple[str, T]]:
        return ((place, record) for place, found in self.lines or () for record in found)

    def unknown(self, key: str, noun: str, numbers: Iterable[int | None]) -> list[str]:
        """What is named by a number that no line has, a wrong one neither."""
        if self.lines is None:
            return []
        missing = dict.fromkeys(n for n in numbers if n is not None and not 0 <= n < len(self.lines))
        return [f"{key}: {noun} {number} that is not there" for number in missing]


def _table(report: Report, root: Path, name: str, adapter: TypeAdapter[T], optional: bool = False) -> Table[T]:
    path = root / f"{name}.jsonl"
    if optional and not path.exists():
        return Table([])
    lines = list(report.every_line(path, adapter))
    return Table(lines if os.access(path, os.R_OK) else None)


def _numbered(report: Report, table: Table[Numbered]) -> None:
    for number, (place, found) in enumerate(table.lines or ()):
        for record in found:
            if record.id != number:
                report.error(place, f"id: {record.id}, but it is the number of the line, from 0: {number}")


def _values(recording: Recording, sample: Sample) -> list[str]:
    """The values that cannot be read. A Recording may be passed on without its values: then none is missed."""
    return [
        reason
        for key, tensor in sample.tensors.items()
        for reason in _failure(f"tensors.{key}", recording.array, tensor)
    ]


def _source(recording: Recording, call: Call) -> list[str]:
    if call.launch is None:
        return []
    read: Callable[[Launch], object] = recording.library if call.launch.language == "tvm" else recording.source
    unread = [] if call.launch.kernel is None else _failure("launch.kernel", read, call.launch)
    return unread + _failure("launch.fragment", recording.fragment, call.launch)


def _failure(key: str, read: Callable[[T], object], subject: T) -> list[str]:
    try:
        read(subject)
    except FormatError as error:
        return [f"{key}: {Path(error.place).name}: {error.reason}"]
    return []


def _derived(report: Report, root: Path) -> None:
    """The files that are derived from the Recording, if there are any."""
    if (path := root / "calling_record.json").exists():
        report.document(path, calling_record.ADAPTER)
    if (path := root / coverage.FILE).exists():
        list(report.lines(path, TypeAdapter(coverage.StepCoverage)))
    if (path := root / "trace.loss.json").exists():
        report.document(path, TypeAdapter(backendbench.Loss))
    if (path := root / "trace.txt").exists():
        check_trace_file(report, path)


def check_trace_file(report: Report, path: Path) -> None:
    """The lines of a BackendBench trace file."""
    problems = backendbench.Problems()
    try:
        for _ in backendbench.read(path, problems=problems):
            pass
    except FormatError as error:
        report.add(error)
    report.skipped(path, problems)

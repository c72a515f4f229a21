"""A FlashInfer-Bench dataset: each file, where it lies, and what the files say of each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from kcap.schemas import calling_record, loss
from kcap.schemas import definition as definitions
from kcap.schemas import solution as solutions
from kcap.schemas.dataset import COUNTS, Dataset, WorkloadCount, files
from kcap.schemas.definition import Definition, check_definition
from kcap.schemas.trace import Trace
from kcap.schemas.validation.blobs import check_blobs, missing_blobs
from kcap.schemas.validation.report import Report
from kcap.schemas.workload import check_workload

TRACES, COUNT_LINES = TypeAdapter(Trace), TypeAdapter(WorkloadCount)
BESIDE: dict[str, TypeAdapter[Any]] = {
    loss.FILE: TypeAdapter(loss.ExportLoss),
    "calling_record.json": calling_record.ADAPTER,
}


def check_dataset(report: Report, root: Path) -> None:
    """Everything in the dataset `root`. Blobs that are not there are warned of: published datasets lack many."""
    if not (root / "definitions").is_dir():
        report.error(root, "not a dataset: it has no definitions/")
    check = _Check(report, root)
    for path in files(root / "definitions", "json"):
        check.definition(path)
    for path in files(root / "workloads", "jsonl"):
        check.workloads(path)
    for path in files(root / "solutions", "json"):
        check.solution(path)
    for path in files(root / "traces", "jsonl"):
        check.traces(path)
    if (path := root / COUNTS).exists():
        check.counts(path)
    for name, adapter in BESIDE.items():
        if (root / name).exists():
            report.document(root / name, adapter)


class _Check:
    """A dataset while it is checked: what was found in the files so far."""

    def __init__(self, report: Report, root: Path) -> None:
        self.report = report
        self.dataset = Dataset(root)
        self.uuids: dict[str, str] = {}  # Definition by Workload
        self.solutions: dict[str, str] = {}  # Definition by Solution

    def definition(self, path: Path) -> None:
        definition = self.report.document(path, definitions.ADAPTER)
        if definition is None:
            return
        self.report.warn(path, *check_definition(definition))
        self._lies_in(path, definition.op_type, f"{definition.name}.json")
        if definition.name in self.dataset.definitions:
            self.report.error(path, f"name: {definition.name} is there twice")
        self.dataset.definitions[definition.name] = definition

    def workloads(self, path: Path) -> None:
        missing: list[str] = []
        found: dict[str, Definition] = {}
        for place, trace in self.report.lines(path, TRACES):
            missing += missing_blobs(self.dataset, trace.workload)
            self.report.error(place, *self._workload(trace))
            if definition := self.dataset.definitions.get(trace.definition):
                found[definition.name] = definition
        for definition in found.values():
            self._lies_in(path, definition.op_type, f"{definition.name}.jsonl")
        if missing:
            self.report.warn(path, f"{len(missing)} inputs are in blobs that are not there, first {missing[0]}")

    def _workload(self, trace: Trace) -> Iterator[str]:
        definition, workload = self.dataset.definitions.get(trace.definition), trace.workload
        if not trace.is_workload:
            yield "solution, evaluation: must be null in workloads/"
        if workload.uuid in self.uuids:
            yield f"workload.uuid: {workload.uuid} is there twice"
        self.uuids[workload.uuid] = trace.definition
        if definition is None:
            yield f"definition: {trace.definition} is not in definitions/"
        else:
            reasons = check_workload(definition, workload) or check_blobs(self.dataset, definition, workload)
            yield from (f"workload.{reason}" for reason in reasons)

    def solution(self, path: Path) -> None:
        solution = self.report.document(path, solutions.ADAPTER)
        if solution is None:
            return
        if solution.definition not in self.dataset.definitions:
            self.report.error(path, f"definition: {solution.definition} is not in definitions/")
        if solution.name in self.solutions:
            self.report.error(path, f"name: {solution.name} is there twice")
        self._lies_in(path, solution.definition, f"{solution.name}.json")
        self.solutions[solution.name] = solution.definition

    def traces(self, path: Path) -> None:
        found = set()
        for place, trace in self.report.lines(path, TRACES):
            self.report.error(place, *self._trace(trace))
            found.add(trace.definition)
        for name in sorted(found):
            self._lies_in(path, f"{name}.jsonl")

    def _trace(self, trace: Trace) -> Iterator[str]:
        definition = self.dataset.definitions.get(trace.definition)
        if trace.is_workload:
            yield "solution, evaluation: a Workload's line belongs into workloads/"
        if definition is None:
            yield f"definition: {trace.definition} is not in definitions/"
        else:
            yield from (f"workload.{reason}" for reason in check_workload(definition, trace.workload))
        if trace.solution and self.solutions.get(trace.solution) not in (None, trace.definition):
            yield f"solution: {trace.solution} solves {self.solutions[trace.solution]}"

    def counts(self, path: Path) -> None:
        for place, count in self.report.lines(path, COUNT_LINES):
            if self.uuids.get(count.workload) != count.definition:
                self.report.error(place, f"workload: {count.definition} has no Workload {count.workload}")

    def _lies_in(self, path: Path, *end: str) -> None:
        """The path must end so; what is before it differs between FlashInfer-Bench's layouts."""
        if path.parts[-len(end) :] != end:
            self.report.error(path, f"for what it holds, its path must end in {'/'.join(end)}")

"""Checks of a FlashInfer-Bench dataset: each file and its path, references between files, the tensors in blobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from kcap.errors import FormatError
from kcap.schemas.flashinfer import calling_record
from kcap.schemas.flashinfer import definition as definitions
from kcap.schemas.flashinfer import solution as solutions
from kcap.schemas.flashinfer.dataset import COUNTS, Dataset, WorkloadCount, files
from kcap.schemas.flashinfer.definition import Definition, SafetensorsInput, Workload, check_definition, check_workload
from kcap.schemas.flashinfer.trace import Trace
from kcap.schemas.results import export_loss
from kcap.schemas.validation.report import Report

# safetensors' names; its 4-bit type packs two elements, of which the formats say nothing
DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "BOOL": "bool",
}

Header = dict[str, tuple[str, tuple[int, ...]]]


def check_blobs(dataset: Dataset, definition: Definition, workload: Workload) -> Iterator[str]:
    """What is wrong with the blobs of `workload`, which is an instance of `definition`; missing files aside."""
    for name, blob in workload.inputs.items():
        if not isinstance(blob, SafetensorsInput):
            continue
        try:
            path = dataset.blob_file(blob)
            tensors = read_blob_header(path) if path.is_file() else None
        except FormatError as error:
            yield f"inputs.{name}: {error.reason}"
        else:
            if tensors is not None:
                yield from (f"inputs.{name}: {reason}" for reason in _check_tensor(definition, workload, name, tensors))


def missing_blobs(dataset: Dataset, workload: Workload) -> Iterator[str]:
    """The blobs of `workload` that are not there."""
    for blob in workload.inputs.values():
        if isinstance(blob, SafetensorsInput):
            try:
                there = dataset.blob_file(blob).is_file()
            except FormatError:
                continue  # an error of its own
            if not there:
                yield blob.path


def read_blob_header(path: Path) -> Header:
    """Each tensor's dtype, by safetensors' name, and shape; FormatError if it is no safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            return {key: (tensor.get_dtype(), tuple(tensor.get_shape())) for key, tensor in slices.items()}
    except (SafetensorError, OSError, ValueError, MemoryError) as error:
        raise FormatError(str(path), f"{path.name}: not a readable safetensors file ({error})") from None


def _check_tensor(definition: Definition, workload: Workload, name: str, tensors: Header) -> Iterator[str]:
    blob, declared = workload.inputs[name], definition.inputs[name]
    assert isinstance(blob, SafetensorsInput)
    if blob.tensor_key not in tensors:
        yield f"{blob.path} has no tensor {blob.tensor_key}"
        return
    dtype, shape = tensors[blob.tensor_key]
    if (stored := DTYPES.get(dtype, dtype)) != declared.dtype and declared.dtype != "float4_e2m1":
        yield f"{blob.tensor_key} is {stored} in {blob.path}, not {declared.dtype}"
    sizes = definition.sizes(declared.shape or [], workload.axes)
    if shape != sizes and declared.dtype != "float4_e2m1":
        yield f"{blob.tensor_key} is {list(shape)} in {blob.path}, not {list(sizes)}"


TRACES, COUNT_LINES = TypeAdapter(Trace), TypeAdapter(WorkloadCount)

BESIDE: dict[str, TypeAdapter[Any]] = {
    export_loss.FILE: TypeAdapter(export_loss.ExportLoss),
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
        definitions: dict[str, Definition] = {}
        for place, trace in self.report.lines(path, TRACES):
            missing += missing_blobs(self.dataset, trace.workload)
            self.report.error(place, *self._workload(trace))
            if definition := self.dataset.definitions.get(trace.definition):
                definitions[definition.name] = definition
        for definition in definitions.values():
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
        names = set()
        for place, trace in self.report.lines(path, TRACES):
            self.report.error(place, *self._trace(trace))
            names.add(trace.definition)
        for name in sorted(names):
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

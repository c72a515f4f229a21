"""A FlashInfer-Bench dataset: the directory of Definitions, Workloads, Solutions and Traces.

    definitions/<op_type>/<name>.json                        one Definition
    workloads/<op_type>/<name>.jsonl                         a Trace of a Workload alone a line
    solutions/<author>/<op_type>/<definition>/<name>.json    one Solution
    traces/<author>/<op_type>/<definition>.jsonl             a Trace a line
    blob/workloads/<op_type>/<name>/<name>_<uuid>.safetensors
    counts.jsonl                                             kcap's own: what each Workload stands for
    kcap.seal                                                kcap's own: this user's seal on the Definitions

Source: FlashInfer-Bench 0.1.2, `data/trace_set.py`; as it does, the reader takes files at any depth of their folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

import orjson
from pydantic import Field

from kcap.errors import FormatError, KcapError
from kcap.schemas.files.jsonfile import read_lines
from kcap.schemas.flashinfer import definition as definitions_file
from kcap.schemas.flashinfer import solution as solutions_file
from kcap.schemas.flashinfer import trace as traces_file
from kcap.schemas.flashinfer.definition import Definition, SafetensorsInput, Workload
from kcap.schemas.flashinfer.solution import Solution
from kcap.schemas.flashinfer.trace import Trace
from kcap.schemas.recording.records import MAX_NUMBER, Count, Record
from kcap.schemas.recording.seal import holds, seal

COUNTS = "counts.jsonl"
SEAL = "kcap.seal"
MAX_PART, MAX_PATH = 255, 2048  # bytes of a name, characters of a path


class WorkloadCount(Record):
    """The exact counts of the Call that a Workload (by uuid) is one of `samples` Samples of."""

    definition: str
    workload: str
    operator: str
    call: int = Field(ge=0, le=MAX_NUMBER)
    samples: int = Field(default=1, ge=1)
    counts: list[Count] = []


def invocations(counts: Iterable[WorkloadCount]) -> Counter[str]:
    """Invocations by Definition. A Call of several Samples is in several Workloads and counts once."""
    calls = {(line.definition, line.operator, line.call): sum(c.count for c in line.counts) for line in counts}
    totals: Counter[str] = Counter()
    for (definition, _, _), count in calls.items():
        totals[definition] += count
    return totals


@dataclass(frozen=True)
class Dataset:
    """A dataset read from disk: Definitions by name, everything else by its Definition's name."""

    root: Path
    definitions: dict[str, Definition] = field(default_factory=dict)
    workloads: dict[str, list[Workload]] = field(default_factory=dict)
    solutions: dict[str, list[Solution]] = field(default_factory=dict)
    traces: dict[str, list[Trace]] = field(default_factory=dict)
    counts: list[WorkloadCount] = field(default_factory=list)

    def content_of(self, workload: Workload) -> bytes:
        """The same for Workloads that differ in names alone, their own or their tensors'; of a tensor whose file
        is not there the name counts. FormatError for one that is not readable."""
        inputs: dict[str, dict[str, Any]] = {}
        for name, given in sorted(workload.inputs.items()):
            inputs[name] = given.model_dump()
            if isinstance(given, SafetensorsInput) and self.blob_file(given).is_file():
                from safetensors.torch import save  # which needs torch

                inputs[name] = {"tensor": sha256(save({name: self.blob(given).contiguous()})).hexdigest()}
        return orjson.dumps([workload.axes, inputs], option=orjson.OPT_SORT_KEYS)

    @classmethod
    def load(cls, root: Path) -> Dataset:
        """Read `root`; FormatError at the first file that is wrong, or if it is no dataset."""
        dataset = cls.load_problems(root)
        for path in files(root / "solutions", "json"):
            solution = solutions_file.read(path)
            dataset.solutions.setdefault(solution.definition, []).append(solution)
        for path in files(root / "traces", "jsonl"):
            for trace in traces_file.read(path):
                dataset.traces.setdefault(trace.definition, []).append(trace)
        return dataset

    @classmethod
    def load_problems(cls, root: Path) -> Dataset:
        """The same without its Solutions and Traces, which are not read."""
        if not (root / "definitions").is_dir():
            raise FormatError(str(root), "not a dataset: it has no definitions/ (kcap export writes one)")
        counts = root / COUNTS
        dataset = cls(root, counts=list(read_lines(counts, WorkloadCount)) if counts.is_file() else [])
        for path in files(root / "definitions", "json"):
            _add_definition(dataset, path)
        for path in files(root / "workloads", "jsonl"):
            for trace in traces_file.read(path):
                if not trace.is_workload:
                    raise FormatError(str(path), f"{trace.workload.uuid}: a Workload has no solution or evaluation")
                dataset.workloads.setdefault(trace.definition, []).append(trace.workload)
        _check_counts(dataset)
        return dataset

    def blob(self, blob: SafetensorsInput) -> Any:
        """The torch tensor of `blob`, on the CPU; FormatError if it is missing, damaged or outside the dataset."""
        from safetensors import SafetensorError, safe_open

        path = self.blob_file(blob)
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(blob.tensor_key)
        except (SafetensorError, OSError, ValueError, KeyError, MemoryError) as error:
            raise FormatError(str(path), f"{blob.tensor_key}: not readable ({error})") from None

    def blob_file(self, blob: SafetensorsInput) -> Path:
        """Where the blob of `blob` is or would be; FormatError for a path that leads out of the dataset, or that no
        file system takes."""
        path = PurePosixPath(blob.path)
        if path.is_absolute() or ".." in path.parts or "\0" in blob.path:
            raise FormatError(str(self.root), f"{blob.path!r}: a blob's path is relative to the dataset, without ..")
        if max(len(part.encode()) for part in (*path.parts, "")) > MAX_PART or len(blob.path) > MAX_PATH:
            raise FormatError(str(self.root), f"{blob.path[:MAX_PART]!r}…: a blob's path is too long")
        return self.root / path


def files(folder: Path, suffix: str) -> list[Path]:
    """The files in `folder` with this suffix, at any depth, sorted."""
    return sorted(path for path in folder.rglob(f"*.{suffix}") if path.is_file())


def blob_path(definition: Definition, uuid: str) -> str:
    """Where the newest layout keeps the tensors of the Workload `uuid`, from the root of the dataset."""
    return f"blob/workloads/{definition.op_type}/{definition.name}/{definition.name}_{uuid}.safetensors"


def _add_definition(dataset: Dataset, path: Path) -> None:
    definition = definitions_file.read(path)
    if definition.name in dataset.definitions:
        raise FormatError(str(path), f"name: {definition.name} is there twice")
    dataset.definitions[definition.name] = definition


def _check_counts(dataset: Dataset) -> None:
    uuids = {(name, workload.uuid) for name, workloads in dataset.workloads.items() for workload in workloads}
    for count in dataset.counts:
        if count.definition not in dataset.definitions or (count.definition, count.workload) not in uuids:
            raise FormatError(str(dataset.root / COUNTS), f"{count.definition} has no Workload {count.workload}")


def seal_dataset(root: Path) -> None:
    """Seal the Definitions of a dataset whose references kcap wrote; without a key that can be made it has no seal."""
    with suppress(OSError, KcapError):
        (root / SEAL).write_text(seal(_definition_hashes(root)))


def is_sealed(root: Path) -> bool:
    """Whether this user's kcap wrote the references of the dataset `root`, and nobody changed them since."""
    try:
        return holds((root / SEAL).read_text(), _definition_hashes(root))
    except (OSError, UnicodeDecodeError):
        return False


def _definition_hashes(root: Path) -> list[str]:
    """Every file below definitions/ with its SHA-256."""
    folder = root / "definitions"
    hashes = {path.relative_to(folder): sha256(path.read_bytes()).hexdigest() for path in files(folder, "json")}
    return [f"definition {path.as_posix()!r} {digest}" for path, digest in hashes.items()]


def write_dataset(
    root: Path,
    definitions: Iterable[Definition],
    workloads: Mapping[str, Sequence[Workload]],
    blobs: Mapping[str, Mapping[str, Any]],
    counts: Iterable[WorkloadCount] = (),
) -> None:
    """Write a dataset into `root` in the newest layout.

    `workloads` are keyed by Definition, `blobs` by a Workload's uuid: its torch tensors by their `tensor_key`, which
    its inputs name with `blob_path`. Files of an earlier dataset that are not written again stay.
    """
    for definition in definitions:
        definition_workloads = workloads.get(definition.name, ())
        definitions_file.write(
            with_folder(root / "definitions" / definition.op_type / f"{definition.name}.json"), definition
        )
        _write_workloads(root, definition, definition_workloads)
        for workload in definition_workloads:
            if workload.uuid in blobs:
                _write_blob(with_folder(root / blob_path(definition, workload.uuid)), blobs[workload.uuid])
    if lines := [count.line() for count in counts]:
        with_folder(root / COUNTS).write_bytes(b"".join(lines))


def _write_workloads(root: Path, definition: Definition, workloads: Sequence[Workload]) -> None:
    if workloads:
        path = with_folder(root / "workloads" / definition.op_type / f"{definition.name}.jsonl")
        traces_file.write(path, (Trace(definition=definition.name, workload=workload) for workload in workloads))


def _write_blob(path: Path, tensors: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file({key: tensor.detach().cpu().clone().contiguous() for key, tensor in tensors.items()}, path)


def with_folder(path: Path) -> Path:
    """`path`, whose folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path

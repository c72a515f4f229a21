"""What Solutions are judged on: the Definitions and Workloads of a dataset, or those derived from a Recording."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kcap.bench.check.verification import Checkers, check_references, tag_definitions
from kcap.bench.contents import CheckTarget, Contents, open_contents
from kcap.bench.exports.flashinfer_bench import write_problems
from kcap.bench.problems import Problems, problems_of
from kcap.errors import CallError, FormatError
from kcap.replay.datasets.workloads import check_trust
from kcap.replay.source import home_device
from kcap.schemas.files.jsonfile import read_lines
from kcap.schemas.flashinfer import definition as definitions_file
from kcap.schemas.flashinfer.dataset import Dataset, WorkloadCount
from kcap.schemas.flashinfer.definition import Definition, SafetensorsInput, Workload
from kcap.schemas.input_kind import detect_input
from kcap.schemas.recording.records import Call, Metadata
from kcap.schemas.results import outcome
from kcap.schemas.results.outcome import ReferenceCheck
from kcap.system.output import atomic_directory

DATASET = "dataset"
DIFFERS = "its reference differs from the recorded operator"


@dataclass(frozen=True)
class PreparedDataset:
    """The dataset folder that judges read, and the Definitions that are at fault themselves, each with its reason."""

    root: Path
    faults: Mapping[str, str]


@dataclass(frozen=True)
class Subject(ABC):
    """`identity` is of the Definitions and Workloads alone. `home`: the device type that was recorded on."""

    path: Path
    definitions: Mapping[str, Definition]
    workloads: Mapping[str, Sequence[Workload]]
    counts: Sequence[WorkloadCount]
    identity: str
    home: str | None = None
    calls: Sequence[Call] = ()
    metadata: Metadata | None = None

    def blobs(self, names: Collection[str]) -> dict[str, str]:
        """By Definition of `names`, the SHA-256 of the files that its Workloads name and `identity` is not of."""
        return {}

    @abstractmethod
    def prepare(self, names: Collection[str], output: Path, on: CheckTarget) -> PreparedDataset:
        """Make what judges read of the Definitions `names`; files go below `output`."""


@dataclass(frozen=True)
class DatasetSubject(Subject):
    """A dataset is judged on as it is."""

    def blobs(self, names: Collection[str]) -> dict[str, str]:
        dataset = Dataset(self.path)
        return {name: blobs_digest(dataset, self.workloads.get(name, ())) for name in sorted(names)}

    def prepare(self, names: Collection[str], output: Path, on: CheckTarget) -> PreparedDataset:
        return PreparedDataset(self.path.resolve(), {})


@dataclass(frozen=True, kw_only=True)
class RecordingSubject(Subject):
    """A Recording's, or a trace file's: a dataset is made of the Definitions that there are Solutions for."""

    contents: Contents
    problems: Problems

    def prepare(self, names: Collection[str], output: Path, on: CheckTarget) -> PreparedDataset:
        """Checks are made once; what an earlier run made stays."""
        root = output / DATASET
        there = {path.stem for path in (root / "definitions").rglob("*.json")}
        checks = _read_checks(root / outcome.REFERENCE_CHECKS_FILE)
        if set(names) - there:
            checks += self._check(set(names) - there, on)
            self._write(root, {*names, *there}, checks)
        return PreparedDataset(
            root.resolve(), {check.definition: _fault(check) for check in checks if check.status == "differs"}
        )

    def _check(self, names: Collection[str], on: CheckTarget) -> list[ReferenceCheck]:
        derived = self.problems.derived
        if derived is None or self.contents.recording is None:
            return []
        kernels = [kernel for kernel in derived.definitions if kernel.definition.name in names]
        with Checkers(self.contents, on) as checkers:
            return list(check_references(checkers, replace(derived, kernels=kernels)))

    def _write(self, root: Path, names: Collection[str], checks: list[ReferenceCheck]) -> None:
        problems = [problem for problem in self.problems.problems if problem.definition.name in names]
        tag_definitions(problems, checks)
        with atomic_directory(root) as folder:
            write_problems(folder, problems)
            outcome.write_reference_checks(folder / outcome.REFERENCE_CHECKS_FILE, checks)


def open_subject(path: Path, trust: bool) -> Subject:
    """What lies at `path`; CallError for a dataset as `check_trust`, FormatError as its reader."""
    if detect_input(path) == "dataset":
        return _of_dataset(path, trust)
    contents = open_contents(path, allow_truncated=True)
    if not contents.calls:
        raise CallError(f"{path}: holds no calls")
    problems = problems_of(contents, engine_forms=True)
    return RecordingSubject(
        path,
        {problem.definition.name: problem.definition for problem in problems.problems},
        {problem.definition.name: list(problem.workloads.values()) for problem in problems.problems},
        [count for problem in problems.problems for count in problem.counts],
        _digest(_files(path)),
        home_device(contents.calls),
        contents.calls,
        contents.metadata,
        contents=contents,
        problems=problems,
    )


def _of_dataset(path: Path, trust: bool) -> Subject:
    check_trust(path, trust)
    dataset = Dataset.load_problems(path)
    if not any(dataset.workloads.values()):
        raise CallError(f"{path}: holds no Workloads (kcap export --to flashinfer-bench writes some)")
    definitions = dict(sorted(dataset.definitions.items()))
    return DatasetSubject(
        path, definitions, dataset.workloads, dataset.counts, dataset_identity(definitions, dataset.workloads)
    )


def dataset_identity(definitions: Mapping[str, Definition], workloads: Mapping[str, Sequence[Workload]]) -> str:
    """The SHA-256 of `definitions` and of their `workloads`, without the blobs that these name."""
    parts = [definitions_file.to_bytes(definition) for definition in definitions.values()]
    parts += [workload.model_dump_json().encode() for name in definitions for workload in workloads.get(name, ())]
    return _digest(parts)


def _files(path: Path) -> Iterable[bytes]:
    """What a Recording's Definitions and Workloads are made from."""
    names = ("calls.jsonl", "samples.jsonl") if path.is_dir() else ("",)
    return (file.read_bytes() for name in names if (file := path / name).is_file())


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def _read_checks(path: Path) -> list[ReferenceCheck]:
    return list(read_lines(path, ReferenceCheck)) if path.is_file() else []


def _fault(check: ReferenceCheck) -> str:
    return f"{DIFFERS} {check.operator}" + (f": {check.reason}" if check.reason else "")


def blobs_digest(dataset: Dataset, workloads: Iterable[Workload]) -> str:
    """The SHA-256 of all blobs that `workloads` name, each read once and a part at a time."""
    inputs = [blob for workload in workloads for blob in workload.inputs.values()]
    blobs = {blob.path: blob for blob in inputs if isinstance(blob, SafetensorsInput)}
    return hashlib.sha256(b"".join(_blob_digest(dataset, blob) for blob in blobs.values())).hexdigest()


def _blob_digest(dataset: Dataset, blob: SafetensorsInput) -> bytes:
    """Zeros for one that cannot be read."""
    with suppress(FormatError, OSError):
        if (path := dataset.blob_file(blob)).is_file():
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").digest()
    return bytes(hashlib.sha256().digest_size)

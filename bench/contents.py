"""What an export or a run starts from: Calls with their Samples, or a dataset; and where its references are checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kcap.errors import CallError
from kcap.replay import source
from kcap.schemas.flashinfer.dataset import Dataset, invocations
from kcap.schemas.input_kind import detect_input
from kcap.schemas.recording.recording import Recording, load
from kcap.schemas.recording.records import Call, Metadata, Sample, kernel_invocations, working_kernels


@dataclass(frozen=True)
class Contents:
    """`recording` is None for a trace file, whose Calls have no phases; `dataset` is None unless PATH is one."""

    path: Path
    metadata: Metadata
    recording: Recording | None = None
    dataset: Dataset | None = None

    @cached_property
    def calls(self) -> list[Call]:
        """Every Call, in the order of the file; none of a dataset."""
        if self.recording is not None:
            return self.recording.calls
        return source.calls_of_trace(self.path, None) if self.dataset is None else []

    @property
    def samples(self) -> list[Sample]:
        return self.recording.drawn_samples if self.recording is not None else []

    @cached_property
    def kernels(self) -> list[Call]:
        """The Calls that count: kernels that do work, and ran."""
        return [call for call in working_kernels(self.calls) if call.total]

    @cached_property
    def total(self) -> int:
        """Invocations, of which an export's shares are: of kernels that do work, or those of a dataset's Workloads."""
        return kernel_invocations(self.calls) if self.dataset is None else sum(_stood_for(self.dataset))


def _stood_for(dataset: Dataset) -> Iterator[int]:
    """Invocations of each Definition; without counts, each of its Workloads is one."""
    counted = invocations(dataset.counts)
    for name in dataset.definitions:
        uuids = {workload.uuid for workload in dataset.workloads.get(name, ())}
        yield counted[name] if name in counted else len(uuids)


def open_contents(path: Path, allow_truncated: bool) -> Contents:
    """What lies at `path`; CallError for a Recording of fewer layers than its model has, unless that is allowed."""
    kind = detect_input(path)
    if kind == "dataset":
        return Contents(path, Metadata(), dataset=Dataset.load(path))
    if kind != "recording":
        return Contents(path, Metadata())
    recording = load(path)
    if not allow_truncated:
        _check_whole(path, recording.metadata)
    return Contents(path, recording.metadata, recording)


def _check_whole(path: Path, metadata: Metadata) -> None:
    recorded, model = metadata.layers_recorded, metadata.layers_model
    if recorded is not None and model is not None and recorded < model:
        raise CallError(
            f"{path}: recorded {recorded} of the model's {model} layers, so that its counts are not the model's: "
            "pass --allow-truncated to export them as they are"
        )


@dataclass(frozen=True)
class CheckTarget:
    """The device to check on (None: as recorded), and whether a Recording from elsewhere may run its sources."""

    device: str | None = None
    trust: bool = False

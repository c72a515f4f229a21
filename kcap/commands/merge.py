"""`kcap merge`: several Recordings, or several datasets, as one."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from filecmp import cmp
from pathlib import Path

import click

from kcap.capture.fold.coverage import summarize
from kcap.capture.fold.recording import derive_files
from kcap.errors import INSTALL_TORCH, CallError, FormatError
from kcap.schemas.files.jsonfile import numbered_lines
from kcap.schemas.flashinfer.dataset import Dataset, files, with_folder, write_dataset
from kcap.schemas.flashinfer.definition import SafetensorsInput, Workload
from kcap.schemas.input_kind import detect_input
from kcap.schemas.merge.datasets import merge_datasets
from kcap.schemas.merge.metadata import Part, files_in
from kcap.schemas.merge.recordings import Merged, merge_recordings
from kcap.schemas.recording.recording import is_named_by, load, write_recording
from kcap.schemas.results import coverage
from kcap.schemas.results.coverage import StepCoverage
from kcap.schemas.validation.dataset import read_blob_header
from kcap.system.output import OutputKind, atomic_directory, check_output

MERGED = OutputKind(
    ("recording.json", "definitions"),
    "neither a Recording nor a dataset, and is not replaced: choose another -o",
)
FOLDERS = ("values", "kernels")  # of content named by its SHA-256


@click.command(epilog="\b\nExample:\n  kcap merge monday.kcap tuesday.kcap -o week.kcap")
@click.argument("paths", nargs=-1, required=True, metavar="DIR...", type=click.Path(path_type=Path))
@click.option("-o", "output", type=click.Path(path_type=Path), required=True, help="The directory to write.")
@click.option("--hosts", is_flag=True, help="The Recordings are of the hosts of one run.")
@click.option("--force", is_flag=True, help="Replace the output.")
def command(paths: tuple[Path, ...], output: Path, hosts: bool, force: bool) -> None:
    """Merge Recordings of the same model with the same settings, or FlashInfer-Bench datasets.

    Counts add, and equal calls, Definitions and workloads join. Runs follow one another: rank 0 of two is one rank
    that ran longer. With --hosts the ranks of one world are put together, and their steps are the same steps; hosts
    that were a world each are replicas, whose ranks follow one another and whose steps add.
    """
    kinds = {path: detect_input(path) for path in paths}
    if len(set(kinds.values())) > 1 or not set(kinds.values()) <= {"recording", "dataset"}:
        found = ", ".join(f"{path} ({kind})" for path, kind in kinds.items())
        raise CallError(f"only Recordings, or only datasets, are merged: {found}")
    if len({path.resolve() for path in paths}) < len(paths):
        raise CallError("one of those to merge is given twice: its counts would be, too")
    if hosts and "dataset" in kinds.values():
        raise CallError("--hosts is for Recordings: a dataset keeps its ranks in its counts")
    check_output(output, force, kind=MERGED, sources=paths)
    if "dataset" in kinds.values():
        with atomic_directory(output) as folder:
            merge_into_dataset(folder, [Dataset.load(path) for path in paths])
    else:
        with atomic_directory(output, private=True) as folder:
            write_merged(folder, merge_recordings([load(path) for path in paths], hosts))
    click.echo(f"Next: kcap show {shlex.quote(str(output))}", err=True)


def write_merged(output: Path, merged: Merged) -> None:
    """Write a merged Recording with its files; FormatError for one whose content is not what its name says."""
    files = {name: dict(_files(merged.parts, name)) for name in FOLDERS}
    steps = list(_coverage(merged))
    for folder, found in files.items():
        (output / folder).mkdir(mode=0o700)
        for name, path in sorted(found.items()):
            shutil.copyfile(path, output / folder / name)
    metadata = merged.metadata
    if steps:
        coverage.write(output / coverage.FILE, steps)
        summary = summarize(steps).model_dump(mode="json", exclude_defaults=True)
        metadata = metadata.model_copy(update={"coverage": summary})
    write_recording(
        output, metadata, merged.calls, merged.programs, merged.steps, merged.samples, requests=merged.requests
    )
    try:
        derive_files(load(output))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        click.echo(f"calling_record.json is left out, for Definitions need PyTorch: {INSTALL_TORCH}", err=True)


def _files(parts: Sequence[Part], folder: str) -> Iterator[tuple[str, Path]]:
    for part in parts:
        for name in sorted(files_in(part.recording.path / folder)):
            path = part.recording.path / folder / name
            if not is_named_by(path.read_bytes(), name):
                raise FormatError(str(path), "its content is not what its name says: the Recording was changed")
            yield name, path


def _coverage(merged: Merged) -> Iterator[StepCoverage]:
    for part in merged.parts:
        if (part.recording.path / coverage.FILE).is_file():
            for step in coverage.read(part.recording.path / coverage.FILE):
                yield merged.moved(part, step)


def merge_into_dataset(output: Path, datasets: Sequence[Dataset]) -> None:
    """Write the merged dataset: its own files, the blobs and Solutions of all as they are, the lines of their Traces.

    CallError for other content under one name, FormatError for a blob that is no safetensors file.
    """
    merged = merge_datasets(output, datasets)
    copies, traces = _copies(datasets), _traces(datasets)
    write_dataset(output, merged.definitions.values(), merged.workloads, {}, merged.counts)
    for name, path in copies.items():
        shutil.copyfile(path, with_folder(output / name))
    for name, lines in traces.items():
        with_folder(output / name).write_bytes(b"\n".join(lines) + b"\n")


def _copies(datasets: Sequence[Dataset]) -> dict[Path, Path]:
    """Files by their path in the dataset; one name is one content."""
    found: dict[Path, Path] = {}
    for dataset in datasets:
        for path in _to_copy(dataset):
            name = path.relative_to(dataset.root)
            if not cmp(found.setdefault(name, path), path, shallow=False):
                raise CallError(f"different content under one name: {name}: rename one")
    return found


def _to_copy(dataset: Dataset) -> Iterator[Path]:
    """What was read as a Solution or can be as a blob: no other file, which a link could name anywhere."""
    yield from files(dataset.root / "solutions", "json")
    given = [one for workloads in dataset.workloads.values() for workload in workloads for one in _blobs(workload)]
    for path in dict.fromkeys(dataset.blob_file(one) for one in given):
        if path.is_file():
            read_blob_header(path)
            yield path


def _blobs(workload: Workload) -> Iterator[SafetensorsInput]:
    yield from (one for one in workload.inputs.values() if isinstance(one, SafetensorsInput))


def _traces(datasets: Sequence[Dataset]) -> dict[Path, dict[bytes, None]]:
    """The lines of each file, those that are equal once."""
    found: dict[Path, dict[bytes, None]] = {}
    for dataset in datasets:
        for path in files(dataset.root / "traces", "jsonl"):
            lines = dict.fromkeys(line.strip() for _, line in numbered_lines(path))
            found.setdefault(path.relative_to(dataset.root), {}).update(lines)
    return found

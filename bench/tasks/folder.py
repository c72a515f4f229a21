"""What lies in a task's folder, and how it is found and read.

instruction.md        what to write, why, what holds, how it is judged
definition.json       the Definition; reference.py: its reference alone
baseline/             the engine's own kernel, where it has a source
example.py            a Solution that passes
solution/solution.py  the one to work on: at first the example
workloads.jsonl       what is judged, a line each: sizes, counts, times, floor
task.json             all of it for programs
dataset/              what the judge reads: definitions/, workloads/, blob/, counts.jsonl
measurements.jsonl    the engine's times, as `kcap replay` measured them; where there are any
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from kcap.bench.run.subject import blobs_digest, dataset_identity
from kcap.bench.run.summary.baseline import Baseline, References, measured_baseline
from kcap.bench.solutions import FoundSolution, RefusedSolution, read_solution, suffixes
from kcap.errors import CallError, FormatError
from kcap.replay.datasets.workloads import UNCOUNTED_PHASES, WorkloadWeights, check_trust, workload_weights
from kcap.schemas.files.jsonfile import read_json
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import Definition, Workload
from kcap.schemas.results.measurement import Measurement, read_measurements
from kcap.schemas.results.task import HELD_OUT_ADAPTER, HELD_OUT_FILE, TASK_ADAPTER, TASK_FILE, Task

DATASET = "dataset"
MEASUREMENTS = "measurements.jsonl"
SOLUTION_FOLDER = "solution"
EXAMPLE = "example.py"
CHANGED = "its dataset is not the one that kcap task wrote: make the task again, or judge with --task and a clean copy"


@dataclass(frozen=True)
class OpenTask:
    """A task that is read. `held_out`: the dataset of its held-out Workloads; None where there is none on this machine.

    `held_out_note`: why Workloads that were kept back are not judged.
    """

    root: Path
    task: Task
    dataset: Dataset
    held_out: Dataset | None = None
    held_out_note: str | None = None

    @property
    def name(self) -> str:
        return self.task.definition

    @property
    def definition(self) -> Definition:
        return self.dataset.definitions[self.name]

    @cached_property
    def weights(self) -> WorkloadWeights:
        return workload_weights(self.dataset.counts)

    @cached_property
    def workloads(self) -> list[Workload]:
        """The most counted first."""
        return sorted(self.dataset.workloads.get(self.name, ()), key=lambda workload: -self.count(workload.uuid))

    def count(self, uuid: str) -> int:
        return sum(self.weights.get((self.name, uuid), UNCOUNTED_PHASES).values())

    @cached_property
    def measurements(self) -> list[Measurement]:
        path = self.root / MEASUREMENTS
        return list(read_measurements(path)) if path.is_file() else []

    @cached_property
    def baseline(self) -> Baseline:
        """The engine's own kernels where they were measured, else the reference."""
        measured = measured_baseline(self.measurements, self.dataset.counts, ())
        return replace(measured, totals=self.task.totals) if any(measured.times.values()) else References()

    def copy_datasets(self, root: Path) -> None:
        """Copy what a judge reads below `root`: what is changed in the folder meanwhile changes nothing."""
        for dataset in (self.dataset, self.held_out):
            if dataset is not None:
                for name in ("definitions", "workloads", "blob"):
                    if (dataset.root / name).is_dir():
                        shutil.copytree(dataset.root / name, root / name, dirs_exist_ok=True)


def find_task(path: Path) -> Path:
    """The folder of the task that `path` is or lies in; CallError if it lies in none."""
    for folder in (path, *path.resolve().parents):
        if (folder / TASK_FILE).is_file():
            return folder
    raise CallError(f"{path}: lies in no task's folder: pass --task DIR (kcap task writes one)")


def open_task(root: Path, trust: bool, held_out: Path | None = None) -> OpenTask:
    """Read the task `root`. `held_out`: where its held-out Workloads are, unless where the task says.

    CallError for code that this user did not export, or that was changed since; FormatError as its readers.
    """
    task = read_json(root / TASK_FILE, TASK_ADAPTER)
    check_trust(root / DATASET, trust)
    dataset = Dataset.load_problems(root / DATASET)
    if task.definition not in dataset.definitions:
        raise FormatError(str(root / DATASET), f"has no Definition {task.definition}")
    if identity(dataset, task.definition) != task.identity:
        raise CallError(f"{root}: {CHANGED}")
    opened = OpenTask(root, task, dataset)
    return _with_held_out(opened, held_out, trust)


def _with_held_out(opened: OpenTask, path: Path | None, trust: bool) -> OpenTask:
    if path is None:
        if opened.task.held_out is None:
            return opened
        path = opened.root / opened.task.held_out.path
        if not (path / HELD_OUT_FILE).is_file():
            count = opened.task.held_out.workloads
            return replace(opened, held_out_note=f"{count} held-out Workloads are not on this machine: not judged")
    if not (path / HELD_OUT_FILE).is_file():
        raise CallError(f"--held-out {path}: has no {HELD_OUT_FILE} (kcap task --held-out-to writes one)")
    kept = read_json(path / HELD_OUT_FILE, HELD_OUT_ADAPTER)
    check_trust(path, trust)
    dataset = Dataset.load_problems(path)
    same = kept.identity == opened.task.identity and dataset.definitions.get(opened.name) == opened.definition
    if not same:
        raise CallError(f"--held-out {path}: was kept back from another task than {opened.root}")
    return replace(opened, held_out=dataset)


def identity(dataset: Dataset, definition: str) -> str:
    """The SHA-256 of the Definition, its Workloads and their blobs."""
    workloads = dataset.workloads.get(definition, [])
    text = dataset_identity({definition: dataset.definitions[definition]}, {definition: workloads})
    return sha256(f"{text} {blobs_digest(dataset, workloads)}".encode()).hexdigest()


def find_solution(opened: OpenTask, path: Path) -> FoundSolution | RefusedSolution:
    """The Solution that `path` is, or the one in the folder that it is; CallError where there is none, or several.

    Of a task's own folder it is the one in solution/.
    """
    folder = path / SOLUTION_FOLDER if path.is_dir() and (path / TASK_FILE).is_file() else path
    if not folder.exists():
        raise CallError(f"{folder}: no such Solution: write {opened.root / SOLUTION_FOLDER / 'solution.py'}")
    files = _candidates(folder) if folder.is_dir() else [folder]
    if len(files) != 1:
        names = ", ".join(file.name for file in files[:5]) or "none"
        raise CallError(f"{folder}: one Solution is judged at a time, and there are {len(files)} ({names}): name one")
    return read_solution(files[0], files[0].parent, {opened.name: opened.definition}, opened.name)


def _candidates(folder: Path) -> Sequence[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in suffixes() and not path.name.startswith("."))

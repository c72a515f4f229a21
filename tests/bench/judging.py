"""A judge worker that judges the Solutions of cheat_catalogue on judged_dataset, as `kcap bench` runs one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cheat_catalogue import DATASET, Entry

from kcap.schemas.flashinfer import definition as definitions_file
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.results.outcome import Outcome
from kcap.system.worker_process import Worker

MODULE = "kcap.bench.judge.worker"
TIMEOUT, BUILD_TIMEOUT, ANSWER = 10.0, 60.0, 900.0
MEMORY = 4 << 30


@dataclass(frozen=True)
class Bench:
    """One judge worker. `scratch`: where its candidates' folders are."""

    worker: Worker
    dataset: Dataset
    scratch: Path

    def judge(self, entry: Entry) -> list[Outcome]:
        """The Outcomes of `entry` on as many Workloads as its header says."""
        name = entry.solution.definition
        return [self._one(entry, workload) for workload in self.dataset.workloads[name][: entry.workloads]]

    def _one(self, entry: Entry, workload: object) -> Outcome:
        definition = self.dataset.definitions[entry.solution.definition]
        request = {
            "solution": entry.solution.model_dump(mode="json"),
            "file": str(entry.file),
            "definition": definitions_file.to_bytes(definition).decode(),
            "workload": workload.model_dump(mode="json"),
        }

        answer = self.worker.run(request, ANSWER)
        assert "solution" in answer, f"the judge worker itself: {answer}"
        return Outcome.model_validate(answer)


@contextmanager
def bench(
    scratch: Path,
    device: str = "cpu",
    timeout: float = TIMEOUT,
    build_timeout: float = BUILD_TIMEOUT,
    seconds: float = 0.05,
) -> Iterator[Bench]:
    """A judge worker on `device`, which ends with the context. All times in seconds: `timeout` is of a Workload."""
    session = {
        "root": str(DATASET),
        "device": device,
        "threads": 1 if device == "cpu" else None,
        "seconds": seconds,
        "timeout": timeout,
        "build_timeout": build_timeout,
        "memory": MEMORY if device == "cpu" else None,
        "scratch": str(scratch),
        "hidden": [str(DATASET)],
    }
    with Worker(session, MODULE) as worker:
        yield Bench(worker, Dataset.load(DATASET), scratch)


def told(outcome: Outcome) -> str:
    """An Outcome in a line, for a test that fails."""
    took = f" {outcome.time.median_us:.1f} us" if outcome.time else ""
    return f"{outcome.solution} on {outcome.workload}: {outcome.status}{took} ({outcome.reason}) {outcome.log[-300:]}"


def eventually(holds, seconds: float = 5.0) -> bool:
    """Whether `holds()` becomes true in time."""
    until = time.monotonic() + seconds
    while not (fine := holds()) and time.monotonic() < until:
        time.sleep(0.05)
    return fine


class Benches(dict):
    """Judge workers by kind, each started when it is first asked for: for one module's tests."""

    KINDS = {
        "cpu": {},
        "hasty": {"timeout": 5.0, "build_timeout": 10.0},
        "impatient": {"timeout": 3.0, "build_timeout": 3.0},
        "patient": {"timeout": 240.0, "build_timeout": 300.0},
        "cuda": {"device": "cuda:0"},
        "patient_cuda": {"device": "cuda:0", "timeout": 240.0, "build_timeout": 300.0},
    }

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__()
        self.folder, self.stack = folder, stack

    def __missing__(self, kind: str) -> Bench:
        (scratch := self.folder / kind).mkdir()
        self[kind] = self.stack.enter_context(bench(scratch, **self.KINDS[kind]))
        return self[kind]

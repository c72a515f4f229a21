"""The Workloads of a FlashInfer-Bench dataset to replay: on each, its Definition's reference is timed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kcap.errors import CallError
from kcap.replay.job import SEED, Choice, Job, Request, Source
from kcap.schemas import definition as definitions_file
from kcap.schemas.dataset import Dataset, WorkloadCount
from kcap.schemas.definition import Definition
from kcap.schemas.workload import Workload

MODULE = "kcap.replay.definitions.timing_worker"
UNTRUSTED = "its references are code from elsewhere: look at them in definitions/, then pass --trust"
UNCOUNTED = {"other": 1}  # invocations of a Workload that counts.jsonl does not tell of
Weights: TypeAlias = "Mapping[tuple[str, str], Counter[str]]"  # by Definition and uuid: invocations by phase


@dataclass(frozen=True)
class WorkloadJob(Job):
    """A Definition's reference to time on one of its Workloads."""

    definition: Definition
    workload: Workload

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def arguments(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.workload.axes.items())
        return f"{axes}  {self.workload.uuid}"

    def as_json(self) -> dict[str, Any]:
        return {"definition": self.name, "workload": self.workload.uuid, "axes": self.workload.axes}

    def requests(self, seconds: float) -> Iterator[Request]:
        text, workload = definitions_file.to_bytes(self.definition).decode(), self.workload.model_dump(mode="json")
        told = self._told()
        body = {"definition": text, "workload": workload, "seed": SEED, "seconds": seconds, "told": told}
        yield Request(body, told)

    def _told(self) -> dict[str, Any]:
        dtypes = [one.dtype for one in self.definition.inputs.values() if one.shape is not None]
        return {
            "call": None,
            "definition": self.name,
            "workload": self.workload.uuid,
            "operator": self.name,
            "count": self.count,
            "dtype": next((name for name in dtypes if "float" in name), dtypes[0] if dtypes else None),
        }


def open_dataset(path: Path, choice: Choice, trust: bool) -> Source:
    """Read the dataset `path`; CallError without `trust`, or if nothing in it is chosen; FormatError as its reader."""
    if not trust:
        raise CallError(f"{path}: {UNTRUSTED}")
    dataset = Dataset.load(path)
    every = [(of, workload) for of in dataset.definitions.values() for workload in dataset.workloads.get(of.name, [])]
    if not every:
        raise CallError(f"{path}: holds no Workloads (kcap export --to flashinfer-bench writes some)")
    weights = weigh(dataset.counts)
    chosen = [_job(of, workload, weights, choice) for of, workload in every if choice.takes(of.name)]
    jobs = sorted((job for job in chosen if job.count), key=lambda job: -job.count)
    if not jobs:
        reason = f"none of its {len(every)} Workloads matches --op or --phase"
        raise CallError(f"{path}: {reason} (kcap show {path} lists its Definitions; counts.jsonl has their phases)")
    return Source(path, jobs[: choice.top], {"home": None, "root": str(path.resolve()), "limit": None}, MODULE)


def _job(definition: Definition, workload: Workload, weights: Weights, choice: Choice) -> WorkloadJob:
    known = weights.get((definition.name, workload.uuid), UNCOUNTED)
    counts = {phase: count for phase, count in known.items() if choice.phase in (None, phase)}
    return WorkloadJob(counts, definition, workload)


def weigh(counts: Iterable[WorkloadCount]) -> Weights:
    """What each Workload stands for. A Call's invocations go to its Samples in turn, so that each has its share."""
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    turns: Counter[tuple[str, str, int]] = Counter()
    for one in counts:
        call = (one.definition, one.operator, one.call)
        turn, begun = turns[call] % one.samples, 0
        turns[call] += 1
        for count in one.counts:
            share = _taken(begun + count.count, turn, one.samples) - _taken(begun, turn, one.samples)
            found[one.definition, one.workload][count.phase] += share
            begun += count.count
    return found


def _taken(invocations: int, turn: int, samples: int) -> int:
    """How many of the first `invocations` are the Sample's whose turn it is at `turn`, and at each `samples` more."""
    return (invocations - turn + samples - 1) // samples

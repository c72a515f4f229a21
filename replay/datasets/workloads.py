"""The Workloads of a FlashInfer-Bench dataset to replay: the reference of the Definition is timed on each.

A Definition that has none gets a default one: small sizes of its variable axes that meet its constraints.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

from kcap.errors import CallError, KcapError
from kcap.replay.jobs import SEED, Choice, Job, ReplaySession, Request, Source
from kcap.schemas.derive import constraints
from kcap.schemas.flashinfer import definition as definitions_file
from kcap.schemas.flashinfer.dataset import Dataset, WorkloadCount, is_sealed
from kcap.schemas.flashinfer.definition import Definition, RandomInput, ScalarInput, Workload, WorkloadInput

TIMING_WORKER = "kcap.replay.datasets.timing_worker"
UNTRUSTED_REFERENCES = (
    "its references are code that you did not export here with kcap, or that was changed since:"
    " look at them in definitions/, then pass --trust"
)
UNCOUNTED_PHASES = {"other": 1}  # invocations of a Workload that counts.jsonl does not list
WorkloadWeights: TypeAlias = "Mapping[tuple[str, str], Counter[str]]"  # by Definition and uuid: invocations by phase


class TimingRequest(TypedDict):
    """A Definition, as its file has it, to time on a Workload; `labels`: the fields that label its Measurement."""

    definition: str
    workload: dict[str, Any]
    seed: int
    seconds: float
    labels: dict[str, Any]


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
        labels = self._labels()
        body = TimingRequest(definition=text, workload=workload, seed=SEED, seconds=seconds, labels=labels)
        yield Request(body, labels)

    def _labels(self) -> dict[str, Any]:
        dtypes = [tensor.dtype for tensor in self.definition.inputs.values() if tensor.shape is not None]
        return {
            "call": None,
            "definition": self.name,
            "workload": self.workload.uuid,
            "operator": self.name,
            "count": self.count,
            "dtype": next((name for name in dtypes if "float" in name), dtypes[0] if dtypes else None),
        }


def check_trust(path: Path, trust: bool) -> None:
    """CallError without `trust`, unless the dataset `path` has this user's seal: exported here, and not changed."""
    if not trust and not is_sealed(path):
        raise CallError(f"{path}: {UNTRUSTED_REFERENCES}")


def open_dataset(path: Path, choice: Choice, trust: bool) -> Source:
    """Read the dataset `path`; CallError if nothing in it is chosen, or as `check_trust`; FormatError as its reader."""
    check_trust(path, trust)
    dataset = Dataset.load(path)
    workloads = [
        (definition, workload)
        for definition in dataset.definitions.values()
        for workload in dataset.workloads.get(definition.name, [])
    ]
    if not workloads:
        raise CallError(f"{path}: holds no Workloads (kcap export --to flashinfer-bench writes some)")
    weights = workload_weights(dataset.counts)
    chosen = [
        _workload_job(definition, workload, weights, choice)
        for definition, workload in workloads
        if choice.takes(definition.name)
    ]
    jobs = sorted((job for job in chosen if job.count), key=lambda job: -job.count)
    if not jobs:
        reason = f"none of its {len(workloads)} Workloads matches --op or --phase"
        raise CallError(f"{path}: {reason} (kcap show {path} lists its Definitions; counts.jsonl has their phases)")
    session = ReplaySession(home=None, root=str(path.resolve()), limit=None)
    return Source(path, jobs[: choice.top], session, TIMING_WORKER)


def _workload_job(definition: Definition, workload: Workload, weights: WorkloadWeights, choice: Choice) -> WorkloadJob:
    invocations = weights.get((definition.name, workload.uuid), UNCOUNTED_PHASES)
    counts = {phase: count for phase, count in invocations.items() if choice.phase in (None, phase)}
    return WorkloadJob(counts, definition, workload)


def workload_weights(counts: Iterable[WorkloadCount]) -> WorkloadWeights:
    """The invocations that each Workload stands for: a Call's are dealt to its Samples in turn, in equal shares."""
    weights: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    samples_seen: Counter[tuple[str, str, int]] = Counter()
    for line in counts:
        call = (line.definition, line.operator, line.call)
        sample, dealt = samples_seen[call] % line.samples, 0
        samples_seen[call] += 1
        for count in line.counts:
            before, after = (_share_of_sample(n, sample, line.samples) for n in (dealt, dealt + count.count))
            weights[line.definition, line.workload][count.phase] += after - before
            dealt += count.count
    return weights


def _share_of_sample(invocations: int, sample: int, samples: int) -> int:
    """How many of the first `invocations` go to the `sample`-th of so many `samples`."""
    return (invocations - sample + samples - 1) // samples


AXIS_GROWTH = {
    "total_q": 2,
    "total_seq_len": 2,
    "num_kv_indices": 3,
    "total_kv": 3,
    "num_pages": 4,
    "state_cache_size": 2,
}


UNIT_SCALARS = {"float32": 1.0, "float16": 1.0, "bfloat16": 1.0, "bool": False}
SOFTMAX_SCALES = frozenset({"sm_scale", "softmax_scale", "scale"})


def default_workload(definition: Definition, size: int = 3) -> Workload:
    """A Workload of about `size` (at least 2) rows or sequences, all tensors random; KcapError if no sizes are found.

    Totals, pages and states are a few times as many. Scalars: 1 / sqrt(the queries' last axis) for a softmax scale, no
    offset, else one.
    """
    axes = _solve_axes(definition, {axis: _first_size(axis, size) for axis in definition.var_axes})
    constraints.check(_axis_constraints(definition), {**axes, **definition.const_axes}, f"{definition.name} of {axes}")
    inputs: dict[str, WorkloadInput] = {
        name: RandomInput()
        if tensor.shape is not None
        else ScalarInput(value=_default_scalar(definition, name, tensor.dtype))
        for name, tensor in definition.inputs.items()
    }
    return Workload(uuid="made-up", axes=axes, inputs=inputs)


def _first_size(axis: str, size: int) -> int:
    """The size before constraints speak; offsets are one more than what they divide."""
    return size + 1 if axis.startswith("len_") else size * AXIS_GROWTH.get(axis, 1)


def _axis_constraints(definition: Definition) -> list[str]:
    return [text for text in definition.constraints if constraints.names(text) <= definition.axes.keys()]


def _solve_axes(definition: Definition, axes: dict[str, int]) -> dict[str, int]:
    """`axes` with those that a constraint sets equal to an expression of others worked out, in the order stated."""
    for text in _axis_constraints(definition):
        match constraints.solved_axis(text):
            case axis, other if axis in axes:
                value = constraints.evaluate(other, {**axes, **definition.const_axes})
                if not isinstance(value, int):
                    raise KcapError(f"{definition.name}: its constraint {text!r} gives {axis} no whole size")
                axes[axis] = value
    return axes


def _default_scalar(definition: Definition, name: str, dtype: str) -> float | int | bool:
    if name in SOFTMAX_SCALES:
        first = next(iter(definition.inputs.values())).shape or [""]
        return 1 / math.sqrt(definition.const_axes.get(first[-1], 1))
    return UNIT_SCALARS.get(dtype, 0)

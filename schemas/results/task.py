"""task.json, in the folder that `kcap task` writes: one Definition for whoever writes a kernel for it.

Beside it lie the dataset that is judged on (`dataset/`), the engine's own times (`measurements.jsonl`) and the texts
that a person or an agent reads. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat, TypeAdapter

from kcap.schemas.results.measurement import Time
from kcap.schemas.results.outcome import Status

TASK_FILE = "task.json"
HELD_OUT_FILE = "held_out.json"
Bound = Literal["memory", "compute"]


class EngineKernel(BaseModel):
    """What the engine runs for the Definition: an operator, or a kernel whose source is in the folder (`source`).

    `launches`: how such a kernel was launched, each way once: grid, constants, warps, as a Recording's Calls have it.
    """

    model_config = ConfigDict(frozen=True)

    operator: str
    invocations: int = 0
    language: str = ""
    source: str | None = None
    launches: Sequence[Mapping[str, Any]] = []


class TaskWorkload(BaseModel):
    """A Workload: how often the engine ran it in each phase, its time there, and the least that a kernel needs.

    `engine_us`: of one invocation of the engine's kernel, by phase. `share`: of the Definition's invocations.
    """

    model_config = ConfigDict(frozen=True)

    workload: str
    axes: Mapping[str, int] = {}
    counts: Mapping[str, int] = {}
    share: FiniteFloat = 0.0
    engine_us: Mapping[str, Time] = {}
    floor_us: Time | None = None
    bytes: int | None = None
    flops: int | None = None
    dtype: str = ""
    bound: Bound | None = None


class Room(BaseModel):
    """What could be gained in a phase, were every Workload as fast as its floor. `total_us`: of all recorded kernels.

    `share`: of that total; None where it is not known.
    """

    model_config = ConfigDict(frozen=True)

    engine_us: Time
    floor_us: Time
    total_us: Time | None = None
    share: FiniteFloat | None = None


class HeldOut(BaseModel):
    """The Workloads that are judged last and are not in the folder: how many there are, and which folder has them."""

    model_config = ConfigDict(frozen=True)

    workloads: int
    path: str


class HeldOutSet(BaseModel):
    """held_out.json: of which task's dataset these Workloads were kept back."""

    model_config = ConfigDict(frozen=True)

    format: Literal["1.0"] = "1.0"
    definition: str
    identity: str


class Task(BaseModel):
    """`identity`: the SHA-256 of what the dataset holds. `baseline`: whose times `engine_us` are; None without any.

    `totals`: microseconds by phase of everything that was measured. `steps`: how many the engine ran in each phase.
    `example`: what the judge said of example.py on the most counted Workload; None where it was not asked.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["1.0"] = "1.0"
    kcap: str
    definition: str
    op_type: str = ""
    model: str | None = None
    framework: str | None = None
    framework_version: str | None = None
    recorded_on: str | None = None
    device: str | None = None
    measured_on: str | None = None
    identity: str
    invocations: int = 0
    steps: Mapping[str, int] = {}
    kernels: Sequence[EngineKernel] = []
    baseline: str | None = None
    totals: Mapping[str, Time] = {}
    workloads: Sequence[TaskWorkload] = []
    room: Mapping[str, Room] = {}
    held_out: HeldOut | None = None
    example: Status | None = None
    notes: Sequence[str] = []


TASK_ADAPTER = TypeAdapter(Task)
HELD_OUT_ADAPTER = TypeAdapter(HeldOutSet)

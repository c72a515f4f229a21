"""A plan: which Solutions run in an engine in the place of which Calls. `kcap apply` writes it, as one JSON file.

It is narrow: a Solution runs only where an invocation is exactly as the Call that it was judged for, in shapes,
strides, dtypes, shared memory and scalars. All else runs the engine's own. Times are microseconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, model_validator

from kcap.errors import CallError
from kcap.schemas.files.jsonfile import dump_json, read_json
from kcap.schemas.flashinfer.solution import Solution
from kcap.schemas.recording.records import Call
from kcap.schemas.recording.seam import Seam
from kcap.schemas.results.measurement import Time

METADATA_FILE = "recording.json"  # of a Recording, by whose hash a plan knows its own again
NAMESPACE = "solution"  # of Solutions in the Recording of an engine that runs with them


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorView(_Part):
    """A view of one of the engine's tensors: shape, strides and offset in elements, the offset from its first. A size
    of -1 - d is that of the tensor's dimension d, which may be another at each start: the pages of a cache.

    `argument`: the path of the tensor among the Call's arguments (`"3"`, `"2.1"`). None: it is `result`, by its
    position among what the operator returns.
    """

    argument: str | None = None
    result: int | None = Field(default=None, ge=0)
    shape: list[int]
    strides: list[int]
    offset: int = 0

    @model_validator(mode="after")
    def _of_one_tensor(self) -> Self:
        if (self.argument is None) == (self.result is None):
            raise ValueError("is of an argument or of a result")
        if len(self.shape) != len(self.strides):
            raise ValueError("has as many strides as dimensions")
        return self

    @property
    def free(self) -> set[int]:
        """The dimensions of the tensor whose size may be another."""
        return {-1 - size for size in self.shape if size < 0}


class Scalar(_Part):
    """A number that is the same in every invocation of the Call."""

    scalar: bool | int | float


class NewTensor(_Part):
    """A tensor that the operator returns, contiguous or not, as the engine gets it."""

    shape: list[int]
    strides: list[int]
    dtype: str


class Padding(_Part):
    """A batch may be padded: where `lengths` is 0, what the operator leaves is nobody's. `dims`: of each output the
    dimension that goes along with `lengths`; None: none does."""

    lengths: TensorView
    dims: list[int | None]


class Replacement(_Part):
    """A Solution in the place of one Call.

    `solution`: the SHA-256 of the Solution. `workloads`: those for which it was judged. `inputs`, `outputs`: the
    Definition's, in its order, as views of what the engine passes. `returned`: what the operator returns, `several`:
    as a tuple; what is empty there is used by nobody. `hints`: paths of arguments that say how the operator computes,
    and not what: they may differ from the Call's. `engine_us`: of one invocation of the engine's kernel, by phase;
    `solution_us`: of the Solution, as the judge has it.
    """

    call: Call
    seam: Seam
    definition: str
    solution: str
    workloads: list[str]
    inputs: list[TensorView | Scalar]
    outputs: list[TensorView]
    returned: list[NewTensor | TensorView] = []
    several: bool = False
    hints: list[str] = []
    padding: Padding | None = None
    engine_us: Mapping[str, Time]
    solution_us: Time

    @property
    def free(self) -> dict[str, set[int]]:
        """By argument, the dimensions whose size may be another than the Call's."""
        found: dict[str, set[int]] = {}
        for view in (*self.inputs, *self.outputs):
            if isinstance(view, TensorView) and view.argument is not None and view.free:
                found.setdefault(view.argument, set()).update(view.free)
        return found

    @property
    def in_place(self) -> bool:
        """Whether the Solution may write to what it reads."""
        read = {one.argument for one in self.inputs if isinstance(one, TensorView)}
        return any(view.argument in read for view in self.outputs if view.argument is not None)

    @property
    def recorded_as(self) -> str:
        """The Solution's operator in a Recording of the engine."""
        return f"{NAMESPACE}::{self.definition}.{self.solution[:8]}"

    def saved_us(self, phase: str) -> float:
        """Of one invocation in this phase, by the judge; 0 where the engine did not run it."""
        return self.saved_by_phase.get(phase, 0.0)

    @property
    def saved_by_phase(self) -> Mapping[str, float]:
        """Of one invocation, in each phase in which the engine ran it."""
        return {phase: us - self.solution_us for phase, us in self.engine_us.items()}


class LeftOut(_Part):
    """A Solution that is not put in, for one Call or (None) at all."""

    solution: str
    definition: str
    operator: str = ""
    call: int | None = None
    reason: str

    @classmethod
    def of(cls, solution: Solution, call: Call | None, reason: str) -> LeftOut:
        return cls(
            solution=f"{solution.author}/{solution.name}", definition=solution.definition,
            operator=call.operator if call else "", call=call.id if call else None, reason=reason,
        )  # fmt: skip

    @property
    def text(self) -> str:
        """In one line."""
        where = f" for {self.operator} (call {self.call})" if self.operator else ""
        return f"left out: {self.solution}{where}: {self.reason}"


class PlanMachine(_Part):
    """What was judged on: the type of device, its name, and torch's version."""

    device: str
    device_name: str = ""
    torch: str = ""


class Plan(_Part):
    """`recording`: where it is, and the SHA-256 of its recording.json. `steps`: its steps, `total_us`: the time of all
    its kernels, both by phase. `solutions`: by their SHA-256."""

    format: Literal["1.0"] = "1.0"
    kcap: str
    recording: str
    recording_sha256: str
    model: str | None = None
    framework: str | None = None
    framework_version: str | None = None
    machine: PlanMachine
    steps: Mapping[str, int] = {}
    total_us: Mapping[str, FiniteFloat] = {}
    solutions: Mapping[str, Solution] = {}
    replacements: Sequence[Replacement] = []
    left_out: Sequence[LeftOut] = []

    @model_validator(mode="after")
    def _holds_its_solutions(self) -> Self:
        for sha256, solution in self.solutions.items():
            if sha256 != solution.sha256:
                raise ValueError(f"solutions: {solution.name} is not the Solution that was judged: its hash is another")
        if missing := {replacement.solution for replacement in self.replacements} - self.solutions.keys():
            raise ValueError(f"solutions: {missing.pop()[:12]} is missing")
        return self

    @property
    def hashes(self) -> dict[str, str]:
        """The SHA-256 of each Solution, by author and name."""
        return {f"{solution.author}/{solution.name}": sha256 for sha256, solution in self.solutions.items()}

    def saved_us(self, phase: str) -> float:
        """Of all that was recorded in the phase, as predicted."""
        return sum(replacement.call.counted(phase) * replacement.saved_us(phase) for replacement in self.replacements)

    def only(self, replacements: Sequence[Replacement], left_out: Sequence[LeftOut] = ()) -> Plan:
        """This plan with some of its replacements; `left_out`: why the others are none."""
        kept = {replacement.solution for replacement in replacements}
        return self.model_copy(
            update={
                "replacements": list(replacements),
                "solutions": {sha256: solution for sha256, solution in self.solutions.items() if sha256 in kept},
                "left_out": [*self.left_out, *left_out],
            }
        )


PLAN_ADAPTER = TypeAdapter(Plan)


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_plan(path: Path) -> Plan:
    """The plan in `path`; CallError where nothing is there, FormatError where it is none, or a Solution in it was
    changed since it was judged."""
    if not path.is_file():
        raise CallError(f"{path}: no such plan (kcap apply writes one)")
    return read_json(path, PLAN_ADAPTER)


def plan_bytes(plan: Plan) -> bytes:
    document: dict[str, Any] = plan.model_dump(mode="json", exclude_defaults=True)
    return dump_json({"format": plan.format, **document})

"""The lines of a shard, as kcap.capture.shards reads them: what does not fit its kind is damaged, and left out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kcap.capture.shards import Shard
from kcap.schemas.recording import Argument, GraphUse, Launch, ValueField

Number = Annotated[int, Field(ge=0, lt=1 << 63)]
Phase = Annotated[int, Field(ge=0, le=3)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Process(_Line):
    pid: Number
    rank: Number = 0
    recorder: str
    recorder_reason: str = ""
    world_size: Number = 1
    layers: Number | None = None
    places: dict[str, Number] = {}


class _Group(_Line):
    name: str = Field(min_length=1)
    rank: Number
    ranks: list[Number]

    @model_validator(mode="after")
    def _check_rank(self) -> _Group:
        if self.rank >= len(self.ranks):
            raise ValueError("a rank that is not in the group")
        return self


class _Call(_Line):
    id: Number
    operator: str = Field(min_length=1)
    kind: Literal["kernel", "region"] = "kernel"
    parent: str | None = None
    work: bool = True
    graph: bool = False
    launch: Launch | None = None
    args: list[Argument]


class _Region(_Line):
    id: Number
    of: Number


class _Program(_Line):
    id: Number
    calls: list[Number]


class _Graph(_Line):
    id: Number
    number: Number
    calls: list[Number]
    nodes: list[tuple[Number, Number]] = []
    total: Number = 0
    size: Number | None = None
    scope: GraphUse | None = None

    @model_validator(mode="after")
    def _check_nodes(self) -> _Graph:
        last = self.total or 1 << 63  # 0: how many there are is not known
        if any(not start <= end <= last for start, end in self.nodes):
            raise ValueError("a call's nodes are not among the graph's")
        return self


class _Annotation(_Line):
    graph: Number
    size: Number | None = None
    scope: GraphUse | None = None


class _KernelName(_Line):
    name: str
    function: str


class _Profiled(_Line):
    index: Number
    program: Number
    phase: Phase
    tokens: Number
    sequences: Number
    lengths: list[Number] = []
    queries: list[Number] = []
    sm_mhz: Number | None = None


class _Batch(_Line):
    id: Number
    program: Number
    phase: Phase
    tokens: Number
    sequences: Number


class _Step(_Line):
    index: Number
    program: Number
    phase: Phase
    tokens: Number
    sequences: Number
    lengths: list[Number] = []
    queries: list[Number] = []
    cached: list[Number] = []


class _Tensor(_Line):
    low: int | None = None
    high: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, tensor: dict[str, Any]) -> dict[str, Any]:
        if "values" in tensor:
            try:
                np.array(tensor["values"], tensor["dtype"]).reshape(tensor["shape"])
            except (KeyError, TypeError, OverflowError) as error:
                raise ValueError(str(error)) from None
        return tensor


class _Sample(_Line):
    call: Number
    phase: Phase
    slot: Number
    step: Number | None = None
    scalars: dict[str, ValueField] = {}
    offsets: dict[str, Number] = {}
    tensors: dict[str, _Tensor] = {}


class _Drift(_Line):
    operator: str
    graph: bool = False
    scalars: int = Field(ge=0)
    offsets: int = Field(ge=0)


class _Window(_Line):
    first: Number
    recorded: Number


class _Note(_Line):
    detail: str


class _Tap(_Line):
    name: str
    status: Literal["ok", "failed", "off", "absent"]
    detail: str


KINDS: dict[str, type[_Line]] = {
    "process": _Process,
    "group": _Group,
    "call": _Call,
    "region": _Region,
    "program": _Program,
    "graph": _Graph,
    "annotation": _Annotation,
    "profiled": _Profiled,
    "kernel_name": _KernelName,
    "batch": _Batch,
    "step": _Step,
    "sample": _Sample,
    "drift": _Drift,
    "tap": _Tap,
    "window": _Window,
    "note": _Note,
}


def sound(shard: Shard) -> Shard:
    """The shard with its damaged lines left out, and counted."""
    lines = {kind: [line for line in found if _fits(kind, line)] for kind, found in shard.lines.items()}
    shard.torn += sum(map(len, shard.lines.values())) - sum(map(len, lines.values()))
    shard.lines = lines
    shard.process = (lines.get("process") or [{}])[0]
    return shard


def _fits(kind: str, line: dict[str, Any]) -> bool:
    try:
        KINDS[kind].model_validate(line, strict=False)
    except (KeyError, ValidationError):
        return False
    return True

"""Reads a shard: its lines by their kind, its counters, its notes. What is torn or does not fit its kind is left out.

Torn last lines are expected, not errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kcap.capture.shards.counts import MAX_BATCHES, MAX_CALLS, PHASE_COUNT, Counts
from kcap.schemas.recording.recording import Argument, GraphUse, Launch, ValueField


@dataclass
class Shard:
    """One process's lines, by their kind, with its counters."""

    stem: Path
    process: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    counts: Counts | None = None
    torn: int = 0

    def header(self, index: int) -> int:
        return self.counts.cells[index] if self.counts else 0

    def batch_count(self, index: int) -> int:
        return self.counts.cells[self.counts.batch(index)] if self.counts and index < MAX_BATCHES else 0

    def loose_counts(self, call: int) -> list[int]:
        if self.counts is None or call >= MAX_CALLS:
            return [0] * PHASE_COUNT
        start = self.counts.loose(call, 0)
        return list(self.counts.cells[start : start + PHASE_COUNT])


def read_shard(stem: Path) -> Shard:
    """Read the shard `stem` (a path without ending); what is torn or damaged is counted, the rest is kept."""
    shard = Shard(stem)
    for suffix in (".jsonl", ".notes"):
        for line in _lines(stem.with_name(stem.name + suffix)):
            if line is None or not isinstance(line.get("t"), str):
                shard.torn += 1
            else:
                shard.lines.setdefault(line.pop("t"), []).append(line)
    shard.process = (shard.lines.get("process") or [{}])[0]
    try:
        shard.counts = Counts(stem.with_name(stem.name + ".counts"))
    except (OSError, ValueError):
        shard.counts = None
    return shard


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    if not path.is_file():
        return
    with path.open("rb") as file:
        for raw in file:
            try:
                line = orjson.loads(raw)
            except ValueError:
                line = None
            yield line if isinstance(line, dict) else None


def stems(directory: Path) -> list[Path]:
    """The shards in a session's directory, in a fixed order."""
    found = {path.with_suffix("") for ending in ("jsonl", "notes") for path in directory.glob(f"*.{ending}")}
    return sorted(found)


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


def without_damaged_lines(shard: Shard) -> Shard:
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

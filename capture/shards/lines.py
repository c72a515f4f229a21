"""The lines of a shard, kind by kind: what both recorders and the window write, and what the fold reads.

`t` names the kind. Numbers of calls, programs, graphs and batches are a shard's own, each counted from 0; calls and
graphs share one count. Phases are indexes into `PHASES`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from kcap.schemas.recording.recording import Argument, GraphUse, Launch, ValueField

Number = Annotated[int, Field(ge=0, lt=1 << 63)]
Phase = Annotated[int, Field(ge=0, le=3)]
MOST_VALUES = 1 << 27  # of a sampled tensor


class Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)


class ProcessLine(Line):
    """The first line: which process this is, of which rank, and what it recorded. `places` as in `Rank`."""

    t: Literal["process"]
    pid: Number
    rank: Number = 0
    world_size: Number = 1
    places: dict[str, Number] = {}
    recorder: str
    recorder_reason: str = ""  # why it is not the native one
    model: str | None = None
    layers: Number | None = None
    framework: str | None = None
    framework_version: str | None = None
    torch: str | None = None
    python: str | None = None
    device: str | None = None
    driver: str | None = None


class GroupLine(Line):
    """A process group of the engine: `rank` is this process's place among its `ranks`."""

    t: Literal["group"]
    name: str = Field(min_length=1)
    rank: Number
    ranks: list[Number]

    @model_validator(mode="after")
    def _check_rank(self) -> GroupLine:
        if self.rank >= len(self.ranks):
            raise ValueError("a rank that is not in the group")
        return self


class CallLine(Line):
    """A call, when it is first seen. `graph`: as it was called while a graph was captured."""

    t: Literal["call"]
    id: Number
    operator: str = Field(min_length=1)
    kind: Literal["kernel", "region"] = "kernel"
    parent: str | None = None
    work: bool = True
    graph: bool = False
    launch: Launch | None = None
    args: list[Argument]


class RegionLine(Line):
    """The call `of`, where another custom operator ran inside it, goes by the number `id`."""

    t: Literal["region"]
    id: Number
    of: Number


class ShapesLine(Line):
    """The call stands for so many distinct ones, whose sizes lie between the same powers of two. The last one holds."""

    t: Literal["shapes"]
    call: Number
    shapes: Number


class DriftLine(Line):
    """Which of the operator's arguments (a bit each) differ from call to call: in a scalar, in a storage offset."""

    t: Literal["drift"]
    operator: str
    graph: bool = False
    scalars: int = Field(ge=0)
    offsets: int = Field(ge=0)


class ProgramLine(Line):
    """What a step ran, in order: calls, and graphs that it replayed."""

    t: Literal["program"]
    id: Number
    calls: list[Number]


class GraphLine(Line):
    """A captured CUDA graph. `number` is its place among the captures; `nodes`: from and to, for each call.

    `kernels`: for each node which of `names` its kernel has (an empty one: none); `after`: the nodes that a node waits
    for, unless that is the one before it alone.
    """

    t: Literal["graph"]
    id: Number
    number: Number
    calls: list[Number]
    nodes: list[tuple[Number, Number]] = []
    total: Number = 0  # nodes; 0: not known
    names: list[str] = []
    kernels: list[Number] = []
    after: list[tuple[Number, list[Number]]] = []
    size: Number | None = None
    scope: GraphUse | None = None

    @model_validator(mode="after")
    def _check_nodes(self) -> GraphLine:
        last = self.total or 1 << 63
        if any(not start <= end <= last for start, end in self.nodes):
            raise ValueError("a call's nodes are not among the graph's")
        return self

    @property
    def node_names(self) -> list[str]:
        """The name of each node's kernel; none where they are not told of all, or a node waits for a later one."""
        if len(self.kernels) != self.total or any(number >= len(self.names) for number in self.kernels):
            return []
        if any(other >= node for node, before in self.after for other in before):
            return []
        return [self.names[number] for number in self.kernels]


class AnnotationLine(Line):
    """What the engine said of a graph after its capture; wins over the graph's own line where a member is there."""

    t: Literal["annotation"]
    graph: Number
    size: Number | None = None
    scope: GraphUse | None = None


class BatchLine(Line):
    """Steps of one shape that ran one Program. How many: the counter of this `id`."""

    t: Literal["batch"]
    id: Number
    program: Number
    phase: Phase
    tokens: Number
    sequences: Number


class StepLine(Line):
    """One step, of those that are listed. `lengths`, `queries`, `cached` as in `Step`; `requests`: their numbers."""

    t: Literal["step"]
    index: Number
    program: Number
    phase: Phase
    tokens: Number
    sequences: Number
    lengths: list[Number] = []
    queries: list[Number] = []
    cached: list[Number] = []
    requests: list[Number] = []


class RequestLine(Line):
    """A request's totals so far, as in `Request`. A later line of the same number replaces it."""

    t: Literal["request"]
    number: Number
    id: str = ""
    requests: Number = 1
    first: Number | None = None
    prompt: Number = 0
    cached: Number = 0
    computed: Number = 0
    decoded: Number = 0
    again: Number = 0
    generated: Number = 0
    prefills: Number = 0
    decodes: Number = 0


class PromptLine(Line):
    """The blocks of `size` tokens of a request's prompt, by a hash of all tokens up to the end of each."""

    t: Literal["prompt"]
    number: Number
    size: Number
    blocks: list[Number]


class ProfiledLine(StepLine):
    """A step that ran under the profiler and does not count."""

    t: Literal["profiled"]  # type: ignore[assignment]
    sm_mhz: Number | None = None


class KernelNameLine(Line):
    """The kernel that the compiler names `name` is `function` in its source."""

    t: Literal["kernel_name"]
    name: str
    function: str


def _without_runs(values: list[Any], dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    """`values`, in which a run of equal ones is [VALUE, COUNT]."""
    pairs = [pair if isinstance(pair, list) else (pair, 1) for pair in values]
    numbers, counts = [number for number, _ in pairs], [count for _, count in pairs]
    if sum(counts) > MOST_VALUES or min(counts, default=1) < 1:
        raise ValueError("runs of too many values, or of none")
    return np.repeat(np.array(numbers, dtype), counts)


class TensorContent(Line):
    """An integer tensor of a sample: its range, and its values where they are kept."""

    low: int | None = None
    high: int | None = None
    values: np.ndarray[Any, np.dtype[Any]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_values(cls, tensor: Any) -> Any:
        if not isinstance(tensor, dict) or "values" not in tensor:
            return tensor
        try:
            values = _without_runs(tensor["values"], tensor["dtype"]).reshape(tensor["shape"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(str(error)) from None
        if values.dtype.kind not in "iu":
            raise ValueError(f"values of {values.dtype}, which is no integer")
        return {**tensor, "values": values}


class SampleLine(Line):
    """What one invocation held. A later line of the same call, phase and slot replaces it. `step` None: in no step.

    Slots from FIRST_COMPARED on (`kcap.capture.recorder.recorder`) are of steps that are like profiled ones, one slot
    for each kind; those before are drawn from all invocations.
    """

    t: Literal["sample"]
    call: Number
    phase: Phase
    slot: Number
    step: Number | None = None
    scalars: dict[str, ValueField] = {}
    offsets: dict[str, Number] = {}
    tensors: dict[str, TensorContent] = {}


class WindowLine(Line):
    """The window opened: at which of the engine's steps, and how many steps were recorded before."""

    t: Literal["window"]
    first: Number
    recorded: Number


class TapLine(Line):
    """How a tap fared in this process."""

    t: Literal["tap"]
    name: str
    status: Literal["ok", "failed", "off", "absent"]
    detail: str


class NoteLine(Line):
    """Something that the Recording's notes should say."""

    t: Literal["note"]
    detail: str


AnyLine = (
    ProcessLine | GroupLine | CallLine | RegionLine | ShapesLine | DriftLine | ProgramLine | GraphLine | AnnotationLine
    | BatchLine | StepLine | RequestLine | PromptLine | ProfiledLine | KernelNameLine | SampleLine | WindowLine
    | TapLine | NoteLine
)  # fmt: skip
LINE: TypeAdapter[AnyLine] = TypeAdapter(Annotated[AnyLine, Field(discriminator="t")])

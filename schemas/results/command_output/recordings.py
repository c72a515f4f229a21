"""What `kcap show`, `gain` and `diff` print of Recordings, trace files and datasets."""

from __future__ import annotations

from typing import Literal

from kcap.schemas.recording.phases import Phase
from kcap.schemas.recording.records import Metadata
from kcap.schemas.recording.seam import Seam
from kcap.schemas.results.command_output.output import Output


class KernelRow(Output):
    """A line of `kcap show`. `calls`: distinct Calls; `graph`: of `count`, replayed by a graph; `seams`: where they can
    be replaced, null among them: some cannot."""

    name: str
    signature: str
    varies: str
    key: str
    parent: str | None
    kind: Literal["kernel", "region"]
    work: bool
    calls: int
    shapes: int
    count: int
    graph: int
    gpu_us: float
    estimated_us: float
    phases: dict[str, int]
    seams: list[Seam | None]


class Hidden(Output):
    """Distinct Calls that are left out."""

    regions: int
    views: int


class KernelsOutput(Output):
    """`kcap show`, of a Recording or a trace file. `total`: invocations that shares are of; `more`: rows left out."""

    by: Literal["kernel", "operator", "family", "phase", "rank"]
    total: int
    more: int
    gpu_us: float
    in_families: int | None = None
    estimated_us: float
    estimated_by: str | None
    hidden: Hidden
    rows: list[KernelRow]
    recording: Metadata | None


class RequestRowOutput(Output):
    """A request, turn or session, or all. `steps_us`: of the steps that it was in, whole; `gpu_us`: its share.

    `number`: the line of a request in requests.jsonl, of a turn in turns.jsonl, a session's number; null of a sum.
    """

    name: str
    number: int | None
    requests: int
    prompt: int
    cached: int
    computed: int
    decoded: int
    again: int
    missed: int
    generated: int
    steps: int
    steps_us: float
    gpu_us: float
    families: dict[str, float]


class NoRequest(Output):
    """What no request accounts for."""

    us: float
    families: dict[str, float]


class RequestsOutput(Output):
    """`kcap show --by request`, `turn` or `session`; what follows `unnamed_tokens` is there where times are known.

    `tokens`: of all steps in which requests run; `unnamed_tokens`: of those that name none, which are in no row.
    """

    by: Literal["request", "turn", "session"]
    rows: list[RequestRowOutput]
    more: int
    total: RequestRowOutput
    tokens: int
    unnamed_tokens: int
    total_us: float | None = None
    listed: int | None = None
    steps: int | None = None
    untimed: int | None = None
    no_request: NoRequest | None = None
    source: str | None = None
    rule: str | None = None


class DefinitionOutput(Output):
    """A Definition of a dataset. An axis of null varies; `missing`: Workloads that name a blob which is not there."""

    name: str
    op_type: str
    axes: dict[str, int | None]
    workloads: int
    missing: int
    solutions: int
    traces: int
    count: int


class DefinitionsOutput(Output):
    """`kcap show` of a dataset."""

    definitions: list[DefinitionOutput]
    more: int


class TurnOutput(Output):
    """A turn of an agent trace's file; null: the file does not tell."""

    item: int
    type: str
    model: str
    messages: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    finish_reason: str
    tools: list[str]
    annotation: str


class TurnsOutput(Output):
    """`kcap show` of an agent trace's file."""

    turns: list[TurnOutput]
    more: int


class GainPhase(Output):
    """`most`: the share of the phase's time that a perfect kernel would save."""

    count: int
    engine_us: float
    floor_us: float | None
    share: float | None
    most: float | None
    most_us_a_step: float | None


class GainRow(Output):
    """A Definition, else a family, else an operator.

    `why_no_seam`: why there is no seam, where the operator has one.
    """

    name: str
    family: str | None
    definition: bool
    seams: list[Seam]
    why_no_seam: str
    times_floor: float | None
    unknown_us: float
    phases: dict[str, GainPhase]


class GainOutput(Output):
    """`kcap gain`. `steps`, `total_us`: by phase; `untimed`: invocations without a time."""

    source: str
    untimed: int
    steps: dict[str, int]
    total_us: dict[str, float]
    rows: list[GainRow]


class Sides(Output):
    """Invocations of kernels in each."""

    a: int
    b: int


class NameInBoth(Output):
    """All entries of one name, and their shares of the totals."""

    name: str
    a: int
    b: int
    a_share: float
    b_share: float


class EntryOfOne(Output):
    """What only one has. `counts`: by `phase rank mode`, of a Definition its Workloads."""

    name: str
    detail: str
    counts: dict[str, int]


class ChangedEntry(Output):
    """What both have: with other counts or, in `fields`, with other content."""

    name: str
    detail: str
    fields: list[str]
    a: dict[str, int]
    b: dict[str, int]


class CallsDiffOutput(Output):
    """`kcap diff --by call`."""

    a: str
    b: str
    by: Literal["call"]
    equal: bool
    totals: Sides
    names: list[NameInBoth]
    only_a: list[EntryOfOne]
    only_b: list[EntryOfOne]
    changed: list[ChangedEntry]


class EngineSide(Output):
    """What one engine runs for a kernel, in the mean step."""

    per_step: float
    us_per_step: float | None
    operators: dict[str, float]
    arguments: dict[str, float]


class EngineLine(Output):
    """A kernel of either; a side of null: only the other one runs it."""

    purpose: str | None
    name: str
    a: EngineSide | None
    b: EngineSide | None


class BatchSteps(Output):
    """Steps of one size."""

    sequences: int
    tokens: int
    steps: int


class EnginePhaseOutput(Output):
    """A phase of one engine; `us_within`: by family, time in a kernel that does several families' work."""

    steps: int
    batches: list[BatchSteps]
    per_step: float
    us_per_step: float | None
    untimed_per_step: float | None
    us_within: dict[str, float]


class PhaseDiffOutput(Output):
    """A phase that both have."""

    phase: Phase
    same_batches: bool
    a: EnginePhaseOutput
    b: EnginePhaseOutput
    lines: list[EngineLine]


class FamiliesDiffOutput(Output):
    """`kcap diff --by family`. `phases_of_one`: steps of phases that are not compared."""

    a: str
    b: str
    by: Literal["family"]
    equal: bool
    warnings: list[str]
    phases_of_one: dict[str, Sides]
    phases: list[PhaseDiffOutput]

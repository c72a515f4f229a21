"""What the files of a Recording hold: a model for each line, with the ranks and taps that its metadata names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, model_validator

from kcap.schemas.recording.phases import Phase
from kcap.schemas.recording.values import Group, TensorSpec, decode, encode, tensors

MAX_RANK = (1 << 31) - 1  # what a table's 32 bits hold
REPLICA = "dp"  # among places: which of data parallelism's replicas
NAMED = 3  # Calls of a Disagreement that its text names


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Rank(_Part):
    """One process that recorded. `rank` is its number in the whole engine, from 0, as torchrun counts and as counts,
    steps, samples and taps have it: replicas one after the other, in each the pipeline's stages, in each the ranks of
    tensor parallelism.

    `places`: its rank in each kind of parallelism that there is more than one of (`{"tp": 1, "pp": 0, "dp": 3}`, or
    whatever else the engine calls its groups); a collective's Group has the same names. `groups`: all ranks of each of
    them, by number. `steps`: those that it counted, by phase. `ended` False: it was killed, so that its steps end
    where it did.
    """

    rank: int = Field(ge=0, le=MAX_RANK)
    pid: int = 0
    places: dict[str, int] = {}
    groups: dict[str, list[int]] = {}
    steps: dict[str, int] = {}
    ended: bool = True


class Difference(_Part):
    """A Call that ranks which must agree did not run as often; its tensors as `kcap show` writes them.

    `counts`: of each of the Disagreement's `ranks`, over the steps that differ.
    """

    operator: str
    signature: str = ""
    counts: list[int]


class Disagreement(_Part):
    """Ranks of one tensor parallel group that ran different steps of one phase.

    `steps`: how many of theirs differ. `calls`: the first Calls that do, `more` others do too; none where only the
    order differs.
    """

    ranks: list[int]
    phase: str
    steps: list[int]
    calls: list[Difference] = []
    more: int = 0

    @property
    def text(self) -> str:
        """Who ran what differently, in one line."""
        texts = [
            f"{difference.operator} {difference.signature}".strip() + f" {_join_numbers(difference.counts)} times"
            for difference in self.calls[:NAMED]
        ]
        more = len(self.calls) - len(texts) + self.more
        summary = "; ".join([*texts, *([f"{more} more Calls"] if more else [])]) or "the same in another order"
        ranks, steps = _join_numbers(self.ranks), _join_numbers(self.steps)
        return f"ranks {ranks} must agree and did not in {steps} {self.phase} steps: {summary}"


def _join_numbers(numbers: list[int]) -> str:
    return " and ".join(f"{number:,}" for number in numbers)


class Tap(_Part):
    """A source of calls in one engine process, and how it fared: `off` where something ran that it could not see,
    `absent` where what it looks into was not there."""

    name: str
    rank: int = 0
    pid: int = 0
    status: Literal["ok", "failed", "off", "absent"] = "ok"
    detail: str = ""


FORMAT = (1, 11)
Mode = Literal["eager", "graph"]
GraphUse = Literal["eager", "piecewise", "full"]
ValueField = Annotated[Any, PlainValidator(decode), PlainSerializer(encode)]


class Record(BaseModel):
    """A line of a Recording: immutable; keys that this version does not know are kept out."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """pydantic's, which would keep what cached properties of the original hold."""
        copied = super().model_copy(update=update, deep=deep)
        for name in vars(copied).keys() - type(self).model_fields.keys():
            del vars(copied)[name]
        return copied

    def line(self) -> bytes:
        return orjson.dumps(self.model_dump(mode="json", exclude_defaults=True)) + b"\n"


class Argument(Record):
    """One argument: its schema name (None where unknown), its Value, and what the schema says of it."""

    name: str | None = None
    value: ValueField = None
    keyword: bool = False  # the schema takes it by keyword only
    default: bool = False  # it equals the schema's default
    written: bool = False  # the operator writes to it

    def line(self) -> bytes:
        raise TypeError("an Argument is part of a Call's line")


MAX_NUMBER = 1 << 48  # of a count, so that sums stay within the 64 bits that JSON and tables have


class Count(Record):
    """How often a Call was invoked in one phase on one rank, eagerly or by replaying a graph."""

    phase: Phase
    rank: int = Field(default=0, ge=0, le=MAX_RANK)
    mode: Mode = "eager"
    count: int = Field(ge=0, le=MAX_NUMBER)


def add_counts(counts: Iterable[Count]) -> list[Count]:
    """Counts of one phase, rank and mode summed, in the order of their first."""
    sums: dict[tuple[str, int, str], Count] = {}
    for count in counts:
        key = (count.phase, count.rank, count.mode)
        earlier = sums.get(key)
        sums[key] = count.model_copy(update={"count": count.count + earlier.count}) if earlier else count
    return list(sums.values())


class Launch(Record):
    """What a kernel is launched from, unless an operator's library holds it: its source, and all that is compiled in.

    `kernel` names the file in kernels/ (None where no source could be read: `unread` says why), `function` the kernel
    in it. In the language `tvm` the file is compiled: the library of a Relax VM or of a tvm-ffi module. `fragment`
    names the file there with the ATen operators that a kernel of inductor stands for, where torch told. `grid`: blocks
    in x, y and z. `num_warps`, `num_stages` None: the compiler's default. Since format 1.9, of what inductor compiles
    without the values: `types` of numbers that are wider than Triton takes them (`i64`), and the parameters that are
    `unspecialized`: the compiler was not told that 16 divides them.
    """

    language: Literal["triton", "cpp", "tvm"] = "triton"
    kernel: str | None = None
    function: str
    unread: str | None = None
    fragment: str | None = None
    grid: list[int] = []
    constexprs: dict[str, ValueField] = {}
    num_warps: int | None = None
    num_stages: int | None = None
    options: dict[str, ValueField] = {}
    types: dict[str, str] = {}
    unspecialized: list[str] = []

    def line(self) -> bytes:
        raise TypeError("a Launch is part of a Call's line")


class Call(Record):
    """One distinct signature: operator with overload (`aten::add.Tensor`), argument tree, parent region.

    A kernel launched from a source of its own is `triton::NAME.ID` (`cpp::NAME.ID`): the name for people, and eight
    digits of the source's SHA-256; a function of a tvm-ffi module is `tvm::NAME`. An engine's own fused operator that
    is no kernel of a library is a region with a namespace of the engine's: `vllm_ir::rms_norm` (an operator of vLLM's
    IR, named as torch's dispatcher would), `vllm_custom_op::silu_and_mul` (one of its CustomOp classes: the arguments
    of `forward`, then the module's own parameters, buffers and plain attributes by their names). `parent` is the
    operator of the region around it. `work` is False for views and allocations: kernels of no work, hidden unless asked
    for. `shapes`: of how many distinct signatures the counts are. It is more than 1 only where one process ran over 256
    of the operator, or 65,536 in all: of those beyond, the ones whose sizes lie between the same powers of two are one
    Call, and `args` are those of the first. It may be too large by those that ran before kcap saw that a number changes
    at each call.
    """

    id: int = Field(ge=0)
    operator: str = Field(min_length=1)
    kind: Literal["kernel", "region"] = "kernel"
    parent: str | None = None
    work: bool = True
    args: list[Argument] = []
    launch: Launch | None = None
    counts: list[Count] = []
    shapes: int = Field(default=1, ge=1)

    @cached_property
    def total(self) -> int:
        return sum(count.count for count in self.counts)

    def counted(self, phase: str | None = None) -> int:
        """The count in `phase`, or over all phases."""
        return sum(count.count for count in self.counts if phase in (None, count.phase))

    @property
    def namespace(self) -> str:
        return self.operator.split("::")[0] if "::" in self.operator else ""

    @property
    def group(self) -> Group | None:
        """The process group that it was given: it is a collective, or one engine's operator around it."""
        return next((argument.value for argument in self.args if isinstance(argument.value, Group)), None)

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Every tensor argument with its path in `args` (`"0"`, `"2.1"`)."""
        return tensors([argument.value for argument in self.args])


def working_kernels(calls: Iterable[Call]) -> list[Call]:
    """The kernels that do work: no views or allocations, no regions. Every total and share is of their invocations."""
    return [call for call in calls if call.kind == "kernel" and call.work]


def kernel_invocations(calls: Iterable[Call]) -> int:
    """How often the kernels in `calls` that do work ran: what every share of a Recording is of."""
    return sum(call.total for call in working_kernels(calls))


def totals(calls: Iterable[Call]) -> dict[str, int]:
    """What recording.json sums up: Calls, and invocations of kernels that do work, of views and of regions."""
    counter = Counter({"calls": 0, "kernels": 0, "views": 0, "regions": 0})
    for call in calls:
        counter["calls"] += 1
        counter["regions" if call.kind == "region" else "kernels" if call.work else "views"] += call.total
    return dict(counter)


class Program(Record):
    """The ordered Calls (by id) that one step or one captured graph ran, and how often it ran.

    `graphs` of a step: [position, Program] of each graph it replayed, where `position` is how many of the step's own
    `calls` came before. Of a graph: `size`, the padded tokens it was captured for, `scope`, what of a step it holds,
    and `captured`, how many captured graphs hold the same Calls; None where the engine does not tell.
    """

    id: int = Field(ge=0)
    kind: Literal["step", "graph"] = "step"
    calls: list[int] = []
    graphs: list[tuple[int, int]] = []
    size: int | None = None
    scope: GraphUse | None = None
    captured: int = 0
    counts: list[Count] = []

    @cached_property
    def total(self) -> int:
        return sum(count.count for count in self.counts)


class Step(Record):
    """One forward of the engine. `lengths`: each sequence's context after it; `queries`: its new tokens;
    `cached`: those of its prompt that were found in a prefix cache, where the engine says so and any were.

    `mode`: whether it replayed no graph, several with calls between them, or one for the whole forward; `padded`: the
    tokens that its graphs were captured for. `requests`: of each sequence the line of its request in requests.jsonl,
    where the engine names them, since format 1.7.
    """

    index: int = Field(ge=0)
    rank: int = 0
    phase: Phase
    tokens: int = 0
    sequences: int = 0
    lengths: list[int] = []
    queries: list[int] = []
    cached: list[int] = []
    requests: list[int] = []
    program: int | None = None
    mode: GraphUse = "eager"
    padded: int | None = None


class Request(Record):
    """What the counted steps computed for one request; exact, though not every step is listed. Since format 1.7.

    `id`: the engine's name for it. `prompt`: its tokens; `cached`: those of them that a prefix cache had when it first
    ran; `computed`: those that these steps computed; `decoded`: tokens after the prompt that they computed; `again`: of
    `computed` and `decoded` those that had been before (the engine had interrupted it). `generated`: tokens that they
    sampled, one for each step that read up to the last known token: an engine that looks ahead (speculative decoding)
    returns more, vLLM that schedules ahead may throw the last one away (SGLang's is not counted). `prefills`,
    `decodes`: steps in which it read its prompt, and others. `first`: the index of its first counted step, None where
    that was a decode. `requests`: how many the line adds up; past 65,536 a process adds them up in one line without
    `id`. `blocks`: with --agent-trace, the prompt's blocks of `block_size` tokens, each a number for all tokens up to
    its end, so that prompts which begin alike have the same first ones.
    """

    id: str = ""
    rank: int = 0
    requests: int = Field(default=1, ge=1)
    first: int | None = None
    prompt: int = Field(default=0, ge=0, le=MAX_NUMBER)
    cached: int = Field(default=0, ge=0, le=MAX_NUMBER)
    computed: int = Field(default=0, ge=0, le=MAX_NUMBER)
    decoded: int = Field(default=0, ge=0, le=MAX_NUMBER)
    again: int = Field(default=0, ge=0, le=MAX_NUMBER)
    generated: int = Field(default=0, ge=0, le=MAX_NUMBER)
    prefills: int = Field(default=0, ge=0, le=MAX_NUMBER)
    decodes: int = Field(default=0, ge=0, le=MAX_NUMBER)
    blocks: list[int] = []

    @property
    def tokens(self) -> int:
        """All that were computed for it."""
        return self.computed + self.decoded


class SampledTensor(Record):
    """An integer tensor's content: `file` in values/ (None: not kept), and its smallest and largest value."""

    file: str | None = None
    low: int | None = None
    high: int | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self

    def line(self) -> bytes:
        raise TypeError("a SampledTensor is part of a Sample's line")


class Sample(Record):
    """What one actual invocation held, taken together. Keys are argument paths (`"3"`, `"2.1"`).

    `compared`: taken because its step is like a profiled one, besides the Samples drawn from all invocations: it stands
    only for those of that step. Since format 1.11.
    """

    call: int
    phase: Phase
    rank: int = 0
    step: int | None = None
    scalars: dict[str, ValueField] = {}
    offsets: dict[str, int] = {}
    tensors: dict[str, SampledTensor] = {}
    compared: bool = False


class RecordedPlan(_Part):
    """The plan that an engine ran with: the SHA-256 of its file, and of each Solution by author and name."""

    sha256: str = ""
    solutions: dict[str, str] = {}


class Metadata(BaseModel):
    """recording.json. `complete` is False when a process ended without closing its shard."""

    model_config = ConfigDict(extra="ignore")

    format: str = "{}.{}".format(*FORMAT)
    kcap: str = ""
    model: str | None = None
    framework: str | None = None
    framework_version: str | None = None
    engine_arguments: dict[str, Any] = {}
    command: list[str] = []
    client: list[str] = []  # that the command was recorded under, since format 1.4
    layers_recorded: int | None = Field(default=None, ge=0, le=MAX_RANK)
    layers_model: int | None = Field(default=None, ge=0, le=MAX_RANK)
    device: str | None = None
    driver: str | None = None
    torch: str | None = None
    python: str | None = None
    world_size: int = Field(default=1, le=MAX_RANK)
    ranks: list[Rank] = []  # those recorded here, since format 1.4
    disagreements: list[Disagreement] = []
    seal: str | None = None  # of this user's: the sources in kernels/ were recorded here
    plan: RecordedPlan | None = None  # of an engine that ran with one, since format 1.8
    coverage: dict[str, Any] | None = None  # a kcap.schemas.results.coverage.CoverageSummary
    recorder: list[str] = []
    kernel_ids: str = "operator"  # of calling_record.json: "definition" since Definitions are derived
    complete: bool = True
    taps: list[Tap] = []
    steps: dict[str, int] = {}
    batches: list[dict[str, Any]] = []
    block_size: int | None = Field(default=None, ge=1, le=MAX_RANK)  # of `blocks` of a Request, since format 1.7
    windows: list[dict[str, int]] = []  # of the first rank, since format 1.4: `first` step, and how many `steps` count
    totals: dict[str, int] = {}
    dropped: dict[str, int] = {}
    notes: list[str] = []

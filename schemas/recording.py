"""The Recording: the directory that `kcap record` writes, lossless, the source of every other format.

    recording.json   Metadata: format, model, framework, device, taps and their health, totals, what was dropped
    calls.jsonl      one Call a line, with its counts
    programs.jsonl   the ordered Calls of one step or captured graph, with the times it ran
    steps.jsonl      a bounded sample of steps; the exact totals are in recording.json
    samples.jsonl    what single invocations held; integer values lie in values/, named by their SHA-256
    values/          safetensors files, each with one tensor `value`
    kernels/         the sources of kernels that no library holds (Triton, inductor), named by their SHA-256

Writing is deterministic: the same content gives the same bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from kcap.errors import FormatError
from kcap.schemas.values import TensorSpec, decode, encode, tensors

FORMAT = (1, 1)
Phase = Literal["prefill", "decode", "mixed", "other"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "mixed", "other")
Mode = Literal["eager", "graph"]
GraphUse = Literal["eager", "piecewise", "full"]
ValueField = Annotated[Any, PlainValidator(decode), PlainSerializer(encode)]


class Record(BaseModel):
    """A line of a Recording: immutable; keys that this version does not know are kept out."""

    model_config = ConfigDict(frozen=True, extra="ignore")

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


class Count(Record):
    """How often a Call was invoked in one phase on one rank, eagerly or by replaying a graph."""

    phase: Phase
    rank: int = 0
    mode: Mode = "eager"
    count: int = Field(ge=0)


class Launch(Record):
    """How a kernel that no library holds was launched: its source, and all that is fixed when it is compiled.

    `kernel` names the file in kernels/ (None where no source could be read: `unread` says why), `function` the kernel
    in it. `grid`: blocks in x, y and z. `num_warps`, `num_stages` None: the compiler's default.
    """

    language: Literal["triton", "cpp"] = "triton"
    kernel: str | None = None
    function: str
    unread: str | None = None
    grid: list[int] = []
    constexprs: dict[str, ValueField] = {}
    num_warps: int | None = None
    num_stages: int | None = None
    options: dict[str, ValueField] = {}

    def line(self) -> bytes:
        raise TypeError("a Launch is part of a Call's line")


class Call(Record):
    """One distinct signature: operator with overload (`aten::add.Tensor`), argument tree, parent region.

    A kernel launched from a source of its own is `triton::NAME.ID` (`cpp::NAME.ID`): the name for people, and eight
    digits of the source's SHA-256. `work` is False for views and allocations: kernels of no work, hidden unless asked
    for.
    """

    id: int = Field(ge=0)
    operator: str = Field(min_length=1)
    kind: Literal["kernel", "region"] = "kernel"
    parent: str | None = None
    work: bool = True
    args: list[Argument] = []
    launch: Launch | None = None
    counts: list[Count] = []

    @cached_property
    def total(self) -> int:
        return sum(count.count for count in self.counts)

    def counted(self, phase: str | None = None) -> int:
        """The count in `phase`, or over all phases."""
        return sum(count.count for count in self.counts if phase in (None, count.phase))

    @property
    def namespace(self) -> str:
        return self.operator.split("::")[0] if "::" in self.operator else ""

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Every tensor argument with its path in `args` (`"0"`, `"2.1"`)."""
        return tensors([argument.value for argument in self.args])


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
    """One forward of the engine. `lengths`: each sequence's context after it; `queries`: its new tokens.

    `mode`: whether it replayed no graph, several with calls between them, or one for the whole forward; `padded`: the
    tokens that its graphs were captured for.
    """

    index: int = Field(ge=0)
    rank: int = 0
    phase: Phase
    tokens: int = 0
    sequences: int = 0
    lengths: list[int] = []
    queries: list[int] = []
    program: int | None = None
    mode: GraphUse = "eager"
    padded: int | None = None


class SampledTensor(Record):
    """An integer tensor's content: `file` in values/ (None: not kept), and its smallest and largest value."""

    file: str | None = None
    low: int | None = None
    high: int | None = None

    def line(self) -> bytes:
        raise TypeError("a SampledTensor is part of a Sample's line")


class Sample(Record):
    """What one actual invocation held, taken together. Keys are argument paths (`"3"`, `"2.1"`)."""

    call: int
    phase: Phase
    rank: int = 0
    step: int | None = None
    scalars: dict[str, ValueField] = {}
    offsets: dict[str, int] = {}
    tensors: dict[str, SampledTensor] = {}


class Tap(Record):
    """A source of calls in one engine process, and how it fared: `off` where something ran that it could not see,
    `absent` where what it looks into was not there."""

    name: str
    rank: int = 0
    pid: int = 0
    status: Literal["ok", "failed", "off", "absent"] = "ok"
    detail: str = ""


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
    layers_recorded: int | None = None
    layers_model: int | None = None
    device: str | None = None
    driver: str | None = None
    torch: str | None = None
    python: str | None = None
    world_size: int = 1
    seal: str | None = None  # of this user's: the sources in kernels/ were recorded here
    coverage: dict[str, Any] | None = None  # a kcap.schemas.coverage.CoverageSummary
    recorder: list[str] = []
    kernel_ids: str = "operator"
    complete: bool = True
    taps: list[Tap] = []
    steps: dict[str, int] = {}
    batches: list[dict[str, Any]] = []
    totals: dict[str, int] = {}
    dropped: dict[str, int] = {}
    notes: list[str] = []


class Recording:
    """A Recording read from disk; `calls`, `programs`, `steps` and `samples` are parsed when first asked for."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.path = path
        self.metadata = metadata

    @cached_property
    def calls(self) -> list[Call]:
        return list(_read_lines(self.path / "calls.jsonl", Call))

    @cached_property
    def programs(self) -> list[Program]:
        return list(_read_lines(self.path / "programs.jsonl", Program))

    @cached_property
    def steps(self) -> list[Step]:
        return list(_read_lines(self.path / "steps.jsonl", Step))

    @cached_property
    def samples(self) -> list[Sample]:
        return list(_read_lines(self.path / "samples.jsonl", Sample))

    def kernels(self, hidden: bool = False) -> list[Call]:
        """The Calls that count as kernels; `hidden` adds views and allocations."""
        return [call for call in self.calls if call.kind == "kernel" and (hidden or call.work)]

    def ran(self, program: Program) -> Iterator[Call]:
        """Every Call of `program` in order, those of the graphs that it replayed among them."""
        replayed = iter(program.graphs)
        upcoming = next(replayed, None)
        for position in range(len(program.calls) + 1):
            while upcoming is not None and upcoming[0] == position:
                yield from (self.calls[number] for number in self.programs[upcoming[1]].calls)
                upcoming = next(replayed, None)
            if position < len(program.calls):
                yield self.calls[program.calls[position]]

    def source(self, launch: Launch) -> str:
        """The text in kernels/ that `launch` names; FormatError if it is missing or not what its name says."""
        if launch.kernel is None:
            raise FormatError(str(self.path), f"the source of {launch.function} was not read: {launch.unread}")
        path = self.path / "kernels" / Path(launch.kernel).name
        try:
            content = path.read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
            raise FormatError(str(path), f"not readable ({getattr(error, 'strerror', error)})") from None
        if hashlib.sha256(content).hexdigest() != path.stem:
            raise FormatError(str(path), "its content is not what its name says: the Recording was changed")
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise FormatError(str(path), f"no text: {error.reason}") from None

    def value(self, tensor: SampledTensor) -> Any:
        """The sampled integer tensor as a torch tensor, or None where only its range was kept."""
        from safetensors.torch import load_file

        if tensor.file is None:
            return None
        path = self.path / "values" / Path(tensor.file).name
        try:
            return load_file(path)["value"]
        except Exception as error:
            raise FormatError(str(path), f"not a readable safetensors file ({error})") from None


def load(path: str | os.PathLike[str]) -> Recording:
    """Read a Recording; FormatError if it is none, is damaged, or has a newer major format."""
    root = Path(path)
    file = root / "recording.json"
    if not file.is_file():
        raise FormatError(str(root), "not a Recording: it has no recording.json (kcap record writes one)")
    try:
        metadata = Metadata.model_validate(orjson.loads(file.read_bytes()))
        major = int(metadata.format.split(".")[0])
    except (ValueError, ValidationError) as error:
        raise FormatError(str(file), _reason(error)) from None
    if major > FORMAT[0]:
        raise FormatError(str(file), f"format {metadata.format} is newer than {FORMAT[0]}.x: upgrade kcap to read it")
    return Recording(root, metadata)


R = TypeVar("R", bound=Record)


def _read_lines(path: Path, model: type[R]) -> Iterator[R]:
    if not path.is_file():
        raise FormatError(str(path), "missing: the Recording is damaged")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield model.model_validate(orjson.loads(line))
            except (ValueError, ValidationError) as error:
                raise FormatError(f"{path}:{number}", _reason(error)) from None


def _reason(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)


def write_recording(
    path: Path,
    metadata: Metadata,
    calls: Iterable[Call],
    programs: Iterable[Program] = (),
    steps: Iterable[Step] = (),
    samples: Iterable[Sample] = (),
    values: Mapping[str, bytes] | None = None,
    kernels: Mapping[str, bytes] | None = None,
) -> None:
    """Write a Recording into `path` (made with mode 0700); recording.json last, so that it marks the rest whole."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    tables: dict[str, Iterable[Record]] = {"calls": calls, "programs": programs, "steps": steps, "samples": samples}
    for name, records in tables.items():
        with (path / f"{name}.jsonl").open("wb") as file:
            file.writelines(record.line() for record in records)
    for folder, files in {"values": values, "kernels": kernels}.items():
        (path / folder).mkdir(mode=0o700, exist_ok=True)
        for name, content in sorted((files or {}).items()):
            (path / folder / name).write_bytes(content)
    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS
    (path / "recording.json").write_bytes(orjson.dumps(metadata.model_dump(mode="json"), option=options) + b"\n")

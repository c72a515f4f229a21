"""The Calls of a report: a column for each fact, and apart from them what is shown of one Call alone.

A page of 100,000 Calls opens at once because texts are kept once (`names`) and because a browser unpacks the details
only when somebody asks for a Call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kcap.errors import FormatError
from kcap.report.agents import TurnDetails, turn_details
from kcap.schemas.recording.phases import PHASES
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Argument, Call, Launch, Sample
from kcap.schemas.recording.seam import seam_of
from kcap.schemas.recording.signature import call_signature, short
from kcap.schemas.recording.values import TensorSpec
from kcap.show.gain import NO_TIME, CallTime
from kcap.show.summary import NO_FAMILY, Times

DIGITS = 4  # of microseconds
MOST_SAMPLES = 4  # of one Call in a report
MOST_SOURCE = 200_000  # characters of one source in a report


@dataclass(frozen=True)
class KernelName:
    """What `kcap gain` makes one row of: a Definition, else the family that a Call is a part of, else an operator."""

    name: str
    family: str
    definition: bool


@dataclass
class PhaseColumns:
    """Of each Call in one phase: invocations, and microseconds of all of them in the engine and at the floor.

    The times are None where the Call has none; at the floor also where that is not known.
    """

    count: list[int] = field(default_factory=list)
    us: list[float | None] = field(default_factory=list)
    floor_us: list[float | None] = field(default_factory=list)


@dataclass
class CallColumns:
    """The kernels that do work, an entry a Call in every list, the costliest first.

    `operator`, `parent`, `seam` and `source` are places in `names`, `kernel` one in `kernels`. `graph`: how many of the
    invocations a graph replayed. `gpu_us` (of the profiled steps) and `estimated_us` are those of `kcap show`. `moved`
    and `flops`: bytes and arithmetic of one invocation; 0 where not known.
    """

    names: list[str] = field(default_factory=list)
    kernels: list[KernelName] = field(default_factory=list)
    id: list[int] = field(default_factory=list)
    operator: list[int] = field(default_factory=list)
    kernel: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    seam: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    signature: list[str] = field(default_factory=list)
    shapes: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    graph: list[int] = field(default_factory=list)
    gpu_us: list[float] = field(default_factory=list)
    estimated_us: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    phases: dict[str, PhaseColumns] = field(default_factory=dict)


class Interned:
    """Texts by number, in the order in which they came."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    @property
    def values(self) -> list[Any]:
        return list(self.numbers)


def call_columns(
    calls: Sequence[Call],
    kernel_of: Mapping[int, tuple[str, str | None, bool]],
    times: Times,
    mix: Mapping[int, CallTime],
) -> CallColumns:
    """The columns of `calls`, in their order.

    `kernel_of`: the row of `kcap gain` that each Call (by id) is in; `mix`: times of one invocation.
    """
    columns, names, kernels = CallColumns(), Interned(), Interned()
    columns.phases = {phase: PhaseColumns() for phase in PHASES if any(call.counted(phase) for call in calls)}
    for call in calls:
        name, family, defined = kernel_of.get(call.id, (call.operator, None, False))
        columns.id.append(call.id)
        columns.operator.append(names(call.operator))
        columns.kernel.append(kernels(KernelName(name, family or NO_FAMILY, defined)))
        columns.parent.append(names(call.parent or ""))
        columns.seam.append(names(seam_of(call) or ""))
        columns.source.append(names(source_of(call)))
        columns.signature.append(call_signature(call))
        columns.shapes.append(call.shapes)
        columns.count.append(call.total)
        columns.graph.append(sum(count.count for count in call.counts if count.mode == "graph"))
        columns.gpu_us.append(round(times.measured.get(call.id, 0.0), DIGITS))
        columns.estimated_us.append(round(times.estimated.get(call.id, 0.0), DIGITS))
        time = mix.get(call.id, NO_TIME)
        columns.moved.append(float(time.moved))  # of tensors that no device holds, more than JSON's 64 bits
        columns.flops.append(float(time.flops))
        _add_phases(columns.phases, call, time)
    columns.names, columns.kernels = names.values, kernels.values
    return columns


def costliest_first(calls: Sequence[Call], times: Times, mix: Mapping[int, CallTime]) -> list[Call]:
    """The order of a report's Calls."""

    def cost(call: Call) -> float:
        timed = [of_count for count in call.counts if (of_count := mix.get(call.id, NO_TIME).of_count(count))]
        return sum(us for us, _ in timed) or times.measured.get(call.id) or times.estimated.get(call.id, 0.0)

    return sorted(calls, key=lambda call: (-cost(call), -call.total, call.operator, call.id))


def _add_phases(phases: Mapping[str, PhaseColumns], call: Call, time: CallTime) -> None:
    for phase, columns in phases.items():
        counts = [count for count in call.counts if count.phase == phase]
        timed = [of_count for count in counts if (of_count := time.of_count(count))]
        columns.count.append(sum(count.count for count in counts))
        columns.us.append(round(sum(us for us, _ in timed), DIGITS) if timed else None)
        floor_us = sum(floor for _, floor in timed) if timed and time.floor_us is not None else None
        columns.floor_us.append(None if floor_us is None else round(floor_us, DIGITS))


def source_of(call: Call) -> str:
    """Where a kernel's code is from: `Triton` or `C++` (a source that was recorded), else the operator's library."""
    if call.launch is not None:
        language = {"triton": "Triton", "cpp": "C++", "tvm": "TVM"}[call.launch.language]
        return f"{language} (inductor)" if call.launch.fragment else language
    return call.namespace or "unknown"


@dataclass
class CallDetails:
    """What is shown of one Call alone; the lists are in the order of `CallColumns`.

    `args`: four numbers for each argument: places in `texts` of its name, of its value and of what its memory is, and
    the sum of 1 (by keyword), 2 (the schema's default), 4 (written). `samples`: lines of text, `more` are left out.
    `launch`: a place in `launches`, or -1.
    """

    texts: list[str] = field(default_factory=list)
    args: list[list[int]] = field(default_factory=list)
    samples: dict[int, list[SampleText]] = field(default_factory=dict)
    more_samples: dict[int, int] = field(default_factory=dict)
    launch: list[int] = field(default_factory=list)
    launches: list[LaunchText] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    definitions: dict[str, DefinitionText] = field(default_factory=dict)
    agents: TurnDetails | None = None


@dataclass(frozen=True)
class DefinitionText:
    """What is shown of one Definition of a dataset. `tensors`: a line for each input and output."""

    description: str
    tensors: list[str]
    constraints: list[str]
    reference: str


@dataclass(frozen=True)
class SampleText:
    """What one invocation held: `holds` names each argument with its value, or with the range of its values."""

    phase: str
    rank: int
    step: int | None
    holds: list[str]


@dataclass(frozen=True)
class LaunchText:
    """`source` and `fragment` are keys of `sources`; None where there is none, for which `unread` says why."""

    function: str
    language: str
    grid: tuple[int, ...]
    options: str
    source: str | None
    fragment: str | None
    unread: str | None


def call_details(recording: Recording | None, calls: Sequence[Call]) -> CallDetails:
    """The details of `calls`, which are in the order of their columns; a trace file's have no Samples and sources."""
    details, texts, launches = CallDetails(), Interned(), Interned()
    for call in calls:
        details.args.append([number for argument in call.args for number in _argument(argument, texts)])
        details.launch.append(launches(_launch_text(call.launch)) if call.launch else -1)
    details.texts, details.launches = texts.values, launches.values
    if recording is not None:
        by_id = {call.id: call for call in calls}
        _add_samples(details, recording.drawn_samples, by_id)
        details.agents = turn_details(recording)
        for call in calls:
            if call.launch is not None:
                _add_source(details.sources, recording, call.launch)
    return details


def _argument(argument: Argument, texts: Interned) -> Iterator[int]:
    yield texts(argument.name or "")
    yield texts(short(argument.value))
    yield texts(_memory(argument.value) if isinstance(argument.value, TensorSpec) else "")
    yield argument.keyword + 2 * argument.default + 4 * argument.written


def _memory(spec: TensorSpec) -> str:
    offset = "varies" if spec.offset is None else f"{spec.offset:,}"
    strides = ", ".join(map(str, spec.effective_strides))
    place = f"the host's, mapped for {spec.device}" if spec.mapped else spec.device
    return f"{place}, strides {strides or '–'}, offset {offset}, storage {spec.storage}"


def _launch_text(launch: Launch) -> LaunchText:
    fixed = {**launch.constexprs, **launch.options, "num_warps": launch.num_warps, "num_stages": launch.num_stages}
    options = ", ".join(f"{name}={short(value)}" for name, value in fixed.items() if value is not None)
    grid = tuple(launch.grid)
    return LaunchText(launch.function, launch.language, grid, options, launch.kernel, launch.fragment, launch.unread)


def _add_samples(details: CallDetails, samples: Iterable[Sample], calls: Mapping[int, Call]) -> None:
    by_call: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.call in calls:
            by_call[sample.call].append(sample)
    for number, of_call in by_call.items():
        details.samples[number] = [_sample_text(sample, calls[number]) for sample in of_call[:MOST_SAMPLES]]
        if len(of_call) > MOST_SAMPLES:
            details.more_samples[number] = len(of_call) - MOST_SAMPLES


def _sample_text(sample: Sample, call: Call) -> SampleText:
    holds = [f"{_argument_name(call, path)} = {short(value)}" for path, value in sample.scalars.items()]
    holds += [f"{_argument_name(call, path)} at offset {offset:,}" for path, offset in sample.offsets.items()]
    for path, tensor in sample.tensors.items():
        known = "no values" if tensor.low is None or tensor.high is None else f"{tensor.low:,} to {tensor.high:,}"
        holds.append(f"{_argument_name(call, path)}: {known}{'' if tensor.file else ' (range only)'}")
    return SampleText(sample.phase, sample.rank, sample.step, holds)


def _argument_name(call: Call, path: str) -> str:
    """`block_table`; of an argument without a name, or inside a list, with its path."""
    first, _, rest = path.partition(".")
    name = call.args[int(first)].name if first.isdecimal() and int(first) < len(call.args) else None
    return f"{name or f'argument {first}'}{f'[{rest}]' if rest else ''}"


def _add_source(sources: dict[str, str], recording: Recording, launch: Launch) -> None:
    """Add the kernel's source and its ATen operators; what cannot be read is a line that says why."""
    for name, read in ((launch.kernel, recording.source), (launch.fragment, recording.fragment)):
        if name is None or name in sources:
            continue
        try:
            text = read(launch) or ""
        except FormatError as error:
            text = f"not shown: {error.reason}"
        more = len(text) - MOST_SOURCE
        sources[name] = text[:MOST_SOURCE] + (f"\n… {more:,} more characters" if more > 0 else "")

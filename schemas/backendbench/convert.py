"""Calls of a Recording as lines of a trace file, and what the lines leave out.

Regions are not written: what ran inside them is. Nor are kernels launched from a source of their own. Views are.
Trailing positional arguments that equal the schema's defaults are left out, and so are such keywords; drifting values
come from the Call's first Sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kcap.schemas.backendbench.calls import DEVICE_OF_TENSORS, canonical
from kcap.schemas.backendbench.line import TraceLine
from kcap.schemas.backendbench.loss import Ledger, Loss
from kcap.schemas.backendbench.text import Unwritable, serialize
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.operators import LAUNCHED, OperatorError, to_trace
from kcap.schemas.recording.recording import Argument, Call, Recording, Sample
from kcap.schemas.recording.signature import signature
from kcap.schemas.recording.values import Drift, Folded, TensorSpec, TorchConstant, Value

DRIFT = "drifting values: the first Sample's are written"
FOLDED = "folded strings"
OFFSET = "storage offsets"
SHARED = "shared storage"
INTEGERS = "values of integer tensors"
HOST = "device: recorded on the CPU, written without a device"
SHAPES = "further shapes, which are counted with this one"


def from_recording(recording: Recording) -> tuple[list[TraceLine], Loss]:
    """The trace lines of a Recording's kernels, in a fixed order, and their loss, for `write`."""
    return trace_lines(recording.calls, recording.drawn_samples)


@dataclass(frozen=True, slots=True)
class Converted:
    """A Call as a line, its arguments as `text`; or `missing`, why it has none. `reduced`: what the line leaves out."""

    call: Call
    line: TraceLine | None = None
    text: str = ""
    missing: str = ""
    reduced: Sequence[str] = ()


def convert_calls(calls: Iterable[Call], samples: Iterable[Sample] = ()) -> Iterator[Converted]:
    """Every kernel that ran, in the order of `calls`."""
    kernels = [call for call in calls if call.kind == "kernel" and call.total]
    first = _first_samples(samples)
    on_host = all(spec.device.startswith("cpu") for call in kernels for _, spec in call.tensors())
    for call in kernels:
        yield _converted(call, first.get(call.id), on_host)


def trace_lines(calls: Iterable[Call], samples: Iterable[Sample] = ()) -> tuple[list[TraceLine], Loss]:
    """Lines by operator, then the most frequent first. Calls whose lines are the same are one line."""
    ledger = Ledger()
    merged: dict[tuple[str, str], TraceLine] = {}
    for converted in convert_calls(calls, samples):
        if converted.line is None:
            ledger.miss(
                converted.call.operator, signature(converted.call.args), converted.missing, converted.call.total
            )
            continue
        for reason in converted.reduced:
            ledger.reduce(converted.call.operator, reason, converted.call.total)
        earlier = merged.get((converted.line.operator, converted.text))
        merged[converted.line.operator, converted.text] = converted.line.joined(earlier) if earlier else converted.line
    ordered = sorted(merged.items(), key=lambda item: (item[0][0], -item[1].count, item[0][1]))
    return [line for _, line in ordered], ledger.loss()


def _first_samples(samples: Iterable[Sample]) -> dict[int, Sample]:
    first: dict[int, Sample] = {}
    for sample in samples:
        if sample.call not in first or _order(sample) < _order(first[sample.call]):
            first[sample.call] = sample
    return first


def _order(sample: Sample) -> tuple[int, str, int]:
    return sample.rank, sample.phase, -1 if sample.step is None else sample.step


def _converted(call: Call, sample: Sample | None, on_host: bool) -> Converted:
    try:
        if call.launch is not None:
            raise OperatorError(call.operator, LAUNCHED[call.launch.language])
        operator = to_trace(call.operator)
        args, kwargs = _Arguments(sample, on_host).of(call)
        text = serialize(args, kwargs)
    except OperatorError as error:
        return Converted(call, missing=error.reason)
    except Unwritable as error:
        return Converted(call, missing=str(error))
    return Converted(call, TraceLine(operator, call.total, args, kwargs), text, reduced=_losses(call, on_host))


class _Arguments:
    """Turns one Call's argument tree into what its line holds."""

    def __init__(self, sample: Sample | None, on_host: bool) -> None:
        self.scalars: dict[str, Value] = sample.scalars if sample else {}
        self.on_host = on_host
        self.storages = 0

    def of(self, call: Call) -> tuple[list[Value], dict[str, Value]]:
        arguments = [(str(index), argument) for index, argument in enumerate(call.args)]
        positional = [(path, argument) for path, argument in arguments if not argument.keyword]
        while positional and positional[-1][1].default:
            positional.pop()
        args = [self.value(argument.value, path) for path, argument in positional]
        keywords = [(path, argument) for path, argument in arguments if argument.keyword and not argument.default]
        return args, {_name(argument): self.value(argument.value, path) for path, argument in keywords}

    def value(self, value: Value, path: str) -> Value:
        match value:
            case list():
                return [self.value(item, f"{path}.{index}") for index, item in enumerate(value)]
            case TensorSpec():
                return self.tensor(value)
            case TorchConstant(kind="device", name=name):
                return TorchConstant("device", _without_index(name))
            case Drift() if path in self.scalars:
                return self.scalars[path]
            case Folded(pattern=pattern):
                return self.scalars.get(path, pattern)
        return value

    def tensor(self, spec: TensorSpec) -> TensorSpec:
        device = DEVICE_OF_TENSORS if self.on_host else _without_index(spec.device)
        spec = canonical(spec)
        self.storages += 1
        return TensorSpec(spec.shape, spec.dtype, spec.strides, 0, device, self.storages - 1)


def _name(argument: Argument) -> str:
    if argument.name is None:
        raise Unwritable("a keyword without a name")
    return argument.name


def _without_index(device: str) -> str:
    """A rank's `cuda:3` is any reader's `cuda`."""
    return device.split(":")[0] if device.startswith(DEVICE_OF_TENSORS) else device


def _losses(call: Call, on_host: bool) -> list[str]:
    specs = [spec for _, spec in call.tensors()]
    lost = {
        DRIFT: _holds(call.args, Drift),
        FOLDED: _holds(call.args, Folded),
        OFFSET: any(spec.offset != 0 for spec in specs),
        SHARED: len({spec.storage for spec in specs}) < len(specs),
        INTEGERS: any(BY_NAME[spec.dtype].kind == "int" for spec in specs),
        HOST: on_host and bool(specs),
        SHAPES: call.shapes > 1,
    }
    return [reason for reason, applies in lost.items() if applies]


def _holds(args: Sequence[Argument], kind: type[Drift] | type[Folded]) -> bool:
    return any(_inside(argument.value, kind) for argument in args)


def _inside(value: Value, kind: type[Drift] | type[Folded]) -> bool:
    if isinstance(value, list):
        return any(_inside(item, kind) for item in value)
    return isinstance(value, kind)

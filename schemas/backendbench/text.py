"""Serialized arguments as text: what `grammar` reads back to the same Values, and BackendBench to the same call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kcap.schemas.backendbench.calls import DEVICE_OF_TENSORS, OPAQUE, canonical, check_tensor
from kcap.schemas.backendbench.grammar import Parser
from kcap.schemas.backendbench.lexer import (
    DEVICE,
    DTYPE_WORDS,
    QUOTED_DEVICE,
    Fault,
    check_integer,
    constant_text,
    quote,
)
from kcap.schemas.backendbench.line import MAX_DEPTH
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.values import Drift, Folded, Group, Opaque, TensorSpec, TorchConstant, Value

DEEPEST = MAX_DEPTH - 6  # leaves room for the brackets around the arguments and for a tensor's own


class Unwritable(ValueError):
    """A trace file has no way to say this Value."""


def serialize(args: Sequence[Value], kwargs: Mapping[str, Value]) -> str:
    """`((args…), {kwargs})`; Unwritable says what the format cannot carry."""
    positional = ", ".join([value_text(value) for value in args])
    keywords = ", ".join([f"{_keyword(name)}: {value_text(value)}" for name, value in kwargs.items()])
    return f"(({positional}{',' if len(args) == 1 else ''}), {{{keywords}}})"


def _keyword(name: str) -> str:
    if not name.isidentifier() or not name.isascii() or name in DTYPE_WORDS:
        raise Unwritable(f"a keyword {name[:40]!r}")
    return f"'{name}'"


def value_text(value: Value, depth: int = 0) -> str:
    """One Value's text."""
    match value:
        case list():
            return _list(value, depth)
        case TensorSpec():
            return tensor_text(value)
        case None | bool():
            return repr(value)
        case int():
            return _integer(value)
        case float():
            return _float(value)
        case complex():
            return f"complex({_float(value.real)}, {_float(value.imag)})"
        case str():
            return _string(value)
    return _special(value)


def _special(value: TorchConstant | Drift | Folded | Opaque | Group) -> str:
    match value:
        case TorchConstant():
            text = constant_text(value)
            if text is None:
                raise Unwritable(f"{value.kind} {value.name[:40]}")
            return text
        case Opaque():
            return _opaque(value.type)
        case Drift():
            raise Unwritable("a drifting scalar without a Sample")
        case Group():
            raise Unwritable("a process group")
    raise Unwritable("a string whose numbers were folded")


def _list(items: list[Value], depth: int) -> str:
    if depth >= DEEPEST:
        raise Unwritable(f"lists nested more than {DEEPEST} deep")
    return f"[{', '.join([value_text(item, depth + 1) for item in items])}]"


def _integer(value: int) -> str:
    try:
        return str(check_integer(value))
    except ValueError as error:
        raise Unwritable(str(error)) from None


def _float(value: float) -> str:
    return "float('nan')" if math.isnan(value) else repr(value)


def _string(value: str) -> str:
    if QUOTED_DEVICE.fullmatch(value):
        raise Unwritable("a string that reads back as a device")
    return f'"{value}"' if value in DTYPE_WORDS else quote(value)


def _opaque(text: str) -> str:
    if text.startswith(OPAQUE) and _reads_back(text):
        return text
    raise Unwritable(f"an opaque value ({text[:40]})")


def _reads_back(text: str) -> bool:
    try:
        args, kwargs = Parser(f"(({text},), {{}})").arguments()
    except Fault:
        return False
    return args == [Opaque(text)] and not kwargs


def tensor_text(spec: TensorSpec) -> str:
    """`T([8, 4096], bf16, stride=(1, 8), device='cpu')`: stride and device only where they are not the default."""
    word = BY_NAME[spec.dtype].word if spec.dtype in BY_NAME else None
    if word is None:
        raise Unwritable(f"a tensor of {spec.dtype[:40]}")
    if not DEVICE.fullmatch(spec.device):
        raise Unwritable(f"a tensor on {spec.device[:40]!r}")
    spec = _writable(spec)
    stride = "" if spec.strides is None else f", stride={spec.strides}"
    device = "" if spec.device == DEVICE_OF_TENSORS else f", device='{spec.device}'"
    return f"T({list(spec.shape)}, {word}{stride}{device})"


def _writable(spec: TensorSpec) -> TensorSpec:
    try:
        return canonical(check_tensor(spec))
    except ValueError as error:
        raise Unwritable(str(error)) from None

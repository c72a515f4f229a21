"""A Call in short: a line of text for people, and a content hash that joins Recordings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from kcap.schemas.recording.dtypes import word
from kcap.schemas.recording.recording import Argument, Call
from kcap.schemas.recording.values import (
    Drift,
    Folded,
    Group,
    Opaque,
    TensorSpec,
    TorchConstant,
    Value,
    encode,
    without_mapped,
)

LONGEST_LIST = 6


def signature(args: Sequence[Argument]) -> str:
    """`bf16[64, 4096] x bf16[4096, 6144]{1, 4096}, 1e-05, dim=[0, 1]`: defaults left out, strides in braces.

    Tensors that follow one another are joined by ` x `. `~int` is a scalar that drifts, `<PyObject>` an opaque value.
    Keywords are named, and so are null and booleans: `keepdim=True`.
    """
    text = ""
    after_tensor = False
    for argument in args:
        if argument.default:
            continue
        tensor = isinstance(argument.value, TensorSpec) and not argument.keyword
        text += (" x " if tensor and after_tensor else ", ") if text else ""
        text += f"{argument.name}={short(argument.value)}" if _named(argument) else short(argument.value)
        after_tensor = tensor
    return text


def call_signature(call: Call) -> str:
    """`signature` of the Call's arguments; vLLM's products with a weight behind a handle as what is multiplied:

    `bf16[32, 128] x packed[128, 256] -> bf16[32, 256]`, where the arguments are `c`, `a` and the handle.
    """
    values = {argument.name: argument.value for argument in call.args}
    factor, product = values.get("a"), values.get("c")
    if "handler_tensor" not in values or not isinstance(factor, TensorSpec) or not isinstance(product, TensorSpec):
        return signature(call.args)
    more = signature([argument for argument in call.args if argument.name not in ("a", "c", "handler_tensor")])
    packed = f"packed[{factor.shape[-1]}, {product.shape[-1]}]"
    return f"{short(factor)} x {packed}{', ' if more else ''}{more} -> {short(product)}"


def _named(argument: Argument) -> bool:
    bare = argument.value is None or isinstance(argument.value, bool)
    return argument.keyword or (bare and argument.name is not None)


def short(value: Value) -> str:
    """One Value in the same short form."""
    match value:
        case TensorSpec():
            return _tensor(value)
        case list():
            more = [f"… {len(value) - LONGEST_LIST} more"] if len(value) > LONGEST_LIST else []
            return f"[{', '.join([short(item) for item in value[:LONGEST_LIST]] + more)}]"
        case TorchConstant(kind="dtype", name=name):
            return word(name)
        case TorchConstant(name=name):
            return name
        case Drift(type=name):
            return f"~{name}"
        case Folded(pattern=pattern):
            return repr(pattern)
        case Opaque(type=name):
            return f"<{name}>"
        case Group(size=size, rank=rank, name=name):
            return f"<{name} rank {rank} of {size}>" if name else f"<rank {rank} of {size}>"
    return repr(value)


def _tensor(spec: TensorSpec) -> str:
    text = f"{word(spec.dtype)}{list(spec.shape)}"
    return text if spec.strides is None else f"{text}{{{', '.join(map(str, spec.strides))}}}"


def call_key(call: Call) -> str:
    """12 hexadecimal digits of a SHA-256 over operator, parent and arguments: the same Call has it in any Recording."""
    args = [
        [argument.name if argument.keyword else None, encode(without_mapped(argument.value))] for argument in call.args
    ]
    identity: list[Any] = [call.operator, call.parent, args]
    if call.launch is not None:
        identity.append(call.launch.model_dump(mode="json", exclude_defaults=True, exclude={"fragment"}))
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]

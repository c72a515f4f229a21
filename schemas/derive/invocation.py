"""One invocation of a Call, as a family reads it: arguments by name, as torch tensors, and what was returned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.operators import base_of
from kcap.schemas.recording.records import Call
from kcap.schemas.recording.values import Drift, Folded, Opaque, TensorSpec, TorchConstant, Value


def flatten(result: Any, several: bool = False) -> dict[tuple[int, ...], torch.Tensor]:
    """The tensors that an operator returned, by position: (0,) alone, (2,) of several, (0, 1) of a list."""
    parts = result if several else [result]
    tensors: dict[tuple[int, ...], torch.Tensor] = {}
    for position, part in enumerate(parts):
        if isinstance(part, torch.Tensor):
            tensors[position,] = part
        elif isinstance(part, list | tuple):
            tensors.update({(position, i): item for i, item in enumerate(part) if isinstance(item, torch.Tensor)})
    return tensors


SINKS, ALIBI, SOFT_CAP = (
    "attention sinks (a logit for each head that no key has), which its reference does not model",
    "ALiBi (biases that grow with the distance of a key), which its reference does not model",
    "soft capping (a tanh that bounds the logits), which its reference does not model",
)
MEANINGS = {  # of arguments whose names do not say it
    **dict.fromkeys(("s_aux", "sinks", "USE_SINKS"), SINKS),
    **dict.fromkeys(("alibi_slopes", "USE_ALIBI_SLOPES", "USE_ALIBI_SQRT"), ALIBI),
    **dict.fromkeys(("logits_soft_cap", "moe_softcapping"), SOFT_CAP),
}


class Unrecognized(Exception):
    """The family does not model this Call: an argument is missing, or asks for something else."""


# What code raises that reads something else than it was written for: a number for a tensor, other ranks, a size of 0
MISREADING = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass
class Invocation:
    """Arguments by name. A tensor is real, or has no data (device `meta`): then only its shape and dtype may be read.

    `result` is what the operator returned, once it ran; `hidden` what no argument shows (a weight behind a handle).
    """

    operator: str
    arguments: dict[str, Any]
    hidden: dict[str, torch.Tensor] = field(default_factory=dict)
    result: Any = None

    @property
    def base(self) -> str:
        """The operator without its overload or, for a kernel with a source of its own, without the source's id."""
        return base_of(self.operator)

    def __getitem__(self, name: str) -> Any:
        """The argument called `name`; None where it is null or the Call has none."""
        return self.arguments.get(name)

    def tensor(self, *names: str) -> torch.Tensor:
        """The first of `names` that is a tensor; Unrecognized if none is."""
        tensor = next((self[name] for name in names if isinstance(self[name], torch.Tensor)), None)
        if tensor is None:
            raise Unrecognized(f"{self.operator} has no tensor called {' or '.join(names)}")
        return tensor

    def optional(self, *names: str) -> torch.Tensor | None:
        """The first of `names` that is a tensor, or None."""
        return next((self[name] for name in names if isinstance(self[name], torch.Tensor)), None)

    def number(self, *names: str) -> float | int:
        """The first of `names` that is a finite number; Unrecognized if none is, or it drifts without a known value."""
        number: float | int | None = next((self[n] for n in names if isinstance(self[n], int | float)), None)
        if number is None or not math.isfinite(number):
            raise Unrecognized(f"{self.operator} has no number called {' or '.join(names)}")
        return number

    def refuse(self, *names: str) -> None:
        """Unrecognized if one of these arguments is set (not null, not False, not zero)."""
        for name in names:
            value = self[name]
            if isinstance(value, torch.Tensor) or value:
                meaning = MEANINGS.get(name.removeprefix("plan."))
                raise Unrecognized(f"{self.operator}: {name} is set{f': {meaning}' if meaning else ''}")

    def weight(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The hidden tensor `name`, or one without data in its place."""
        return self.hidden.get(name, torch.empty(shape, dtype=dtype, device="meta"))


def torch_dtype(name: str, error: type[Exception] = Unrecognized) -> torch.dtype:
    """torch's dtype of this name; `error` if it is in no table here, or this torch has none."""
    dtype = getattr(torch, name, None) if name in BY_NAME else None
    if not isinstance(dtype, torch.dtype):
        raise error(f"torch {torch.__version__} has no dtype {name}")
    return dtype


def invocation_of(call: Call, contents: Mapping[str, torch.Tensor] | None = None) -> Invocation:
    """`call` without data, but for the integer tensors whose values `contents` holds by argument path (`"3"`, `"2.1"`).

    An argument without a name (a trace file has none) takes its schema's, or is called `arg0`, `arg1` by its place.
    """
    values = contents or {}
    names = argument_names(call)
    arguments = {
        n: without_data(a.value, str(i), values) for i, (n, a) in enumerate(zip(names, call.args, strict=True))
    }
    return Invocation(call.operator, implied(call) | arguments)


def implied(call: Call) -> dict[str, Any]:
    """By name what holds where `call` passes nothing else, and a family reads like arguments: the schema's defaults,
    which a trace file leaves out; the constexprs of a Triton kernel, and `num_warps`.
    """
    if call.launch is None:
        return _schema(call.operator)
    fixed = {name: without_data(value, name, {}) for name, value in call.launch.constexprs.items()}
    return {"num_warps": call.launch.num_warps, **fixed}


def argument_names(call: Call) -> list[str]:
    """The name of each argument: as recorded, else as torch's registered schema has it, else by its place."""
    fallbacks = [] if all(argument.name for argument in call.args) else schema_names(call.operator)
    fallbacks += [f"arg{position}" for position in range(len(fallbacks), len(call.args))]
    return [argument.name or name for argument, name in zip(call.args, fallbacks, strict=False)]


@cache
def _schema(operator: str) -> dict[str, Any]:
    """The names of a registered operator's arguments in their order, each with its default or None."""
    base, _, overload = operator.partition(".")
    if operator not in torch._C._dispatch_get_all_op_names():
        return {}
    return {argument.name: argument.default_value for argument in torch._C._get_schema(base, overload).arguments}


def schema_names(operator: str) -> list[str]:
    """The names of a registered operator's arguments in their order; none if torch does not know it."""
    return list(_schema(operator))


def without_data(value: Value, path: str, contents: Mapping[str, torch.Tensor]) -> Any:
    """The Python object of a recorded value, tensors on `meta`; Drift, Folded and Opaque as they are."""
    match value:
        case TensorSpec():
            if path in contents:
                return contents[path]
            strides = value.effective_strides
            return torch.empty_strided(value.shape, strides, dtype=torch_dtype(value.dtype), device="meta")
        case list():
            return [without_data(item, f"{path}.{index}", contents) for index, item in enumerate(value)]
        case TorchConstant(kind="dtype", name=name):
            return torch_dtype(name)
        case Drift() | Folded() | Opaque() | TorchConstant():
            return value
    return value


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
OUTPUTS = ("out", "c", "C", "d", "output")


def result_dtype(call: Invocation, usual: torch.dtype) -> torch.dtype:
    """The dtype of what the operator writes or returns."""
    out, wanted = call.optional(*OUTPUTS), call["out_dtype"]
    if out is not None:
        return out.dtype
    return wanted if isinstance(wanted, torch.dtype) else usual


def written_or_returned(call: Invocation, *names: str) -> torch.Tensor:
    """The argument of one of these names that the operator wrote, or else what it returned."""
    written = call.optional(*names)
    return call.result if written is None else written


def total_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of all elements."""
    return sum(int(tensor.numel() * tensor.element_size()) for tensor in tensors)


def has_strides(tensor: torch.Tensor, *strides: int | None) -> bool:
    """Whether the dimensions of `tensor` have these strides, as far as they have more than one place; None: any.

    A Sample's values are contiguous, however the recorded tensor lay: such a tensor passes.
    """
    if tensor.is_contiguous() and not tensor.is_meta:
        return True
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(size == 1 or wanted is None or wanted == stride for size, stride, wanted in pairs)


def distinct_rows(indices: torch.Tensor) -> int:
    """How many rows `indices` name; where their values are not known, one."""
    return min(indices.numel(), 1) if indices.is_meta else len(indices.unique())


def require_values(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """`tensor`, whose values are needed; Unrecognized if it has none."""
    if tensor.is_meta:
        raise Unrecognized(f"the {what} were not sampled")
    return tensor

"""What a kernel's source says of its arguments, and a Recording's fixed values as Python objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kcap.replay.bind import Bound
from kcap.replay.layout import torch_dtype
from kcap.replay.skip import Skip
from kcap.schemas.values import Drift, Folded, Opaque, TensorSpec, TorchConstant, Value

# inductor asserts `(0 <= tmp) & (tmp < N)`, in Triton and in C++ with the same words; N may be a size such as ks0.
BOUND = re.compile(r"index out of bounds: (?:0 <= )?[^<\"']+ < ([^<\"']+)[\"']")
POINTER = re.compile(r"(in|out|in_out)_ptr\d+")
NUMEL = re.compile(r"[xyzr]\d*_?numel")


@dataclass(frozen=True)
class Alias:
    """As torch's schemas have it: whether the argument is written to."""

    is_write: bool


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel, as a torch schema has its arguments."""

    name: str
    alias_info: Alias | None = None


@dataclass(frozen=True)
class Parameters:
    """A kernel's parameters in place of an operator's schema."""

    arguments: list[Parameter]

    @classmethod
    def of(cls, names: Iterable[str], written: tuple[str, ...]) -> Parameters:
        """Those called `names`; they are written to where the name starts with one of `written`."""
        return cls([Parameter(name, Alias(True) if name.startswith(written) else None) for name in names])


@dataclass(frozen=True)
class Runnable:
    """What runs a kernel, the names of its run-time parameters in order, and notes for its measurements."""

    run: Callable[..., Any]
    parameters: list[str]
    notes: Sequence[str] = ()


def inductor_made(text: str, parameters: list[str]) -> bool:
    """Whether inductor wrote this Triton kernel: it says how far it indexes, or knows that its indices are good."""
    named = any(map(POINTER.fullmatch, parameters)) and any(map(NUMEL.fullmatch, parameters))
    return "triton_helpers" in text or named


def least_bound(text: str, bound: Bound) -> int:
    """The first number that some index in `text` may not have; 1 where none is given: zero is always valid."""
    limits = [_number(limit.strip(), bound) for limit in BOUND.findall(text)]
    return max(min(limits, default=1), 1)


def _number(limit: str, bound: Bound) -> int:
    digits = limit.removesuffix("L")
    value = int(digits) if digits.isdecimal() else bound[limit]
    return value if isinstance(value, int) else 1


def python_value(value: Value, name: str) -> Any:
    """What a constexpr or an option was, from its Value; Skip where that cannot be told."""
    match value:
        case list():
            return tuple(python_value(item, name) for item in value)
        case TorchConstant(kind="triton"):
            return triton_dtype(value.name)
        case TorchConstant(kind="dtype"):
            return torch_dtype(value.name)
        case Opaque(type=kind):
            raise Skip(f"its constant '{name}' is opaque ({kind})")
        case TorchConstant() | TensorSpec() | Drift() | Folded():
            raise Skip(f"its constant '{name}' has no fixed value")
    return value


def triton_dtype(name: str) -> Any:
    """Triton's dtype of this name; Skip if this Triton has none."""
    import triton.language as tl

    try:
        return tl.dtype(name)
    except (AssertionError, RuntimeError, ValueError):
        raise Skip(f"this Triton has no dtype {name[:40]}") from None

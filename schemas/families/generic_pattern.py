"""A Call apart: its pattern, which all Calls of a group share, and the sizes and numbers in which they may differ.

Calls group by operator, by which arguments are tensors (their dtypes, ranks and kinds of device), lists (their
lengths), None, and by every string, bool, dtype and number that decides what is computed.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from kcap.schemas.definition import DTYPES
from kcap.schemas.families.generic_operator import Operator, operator
from kcap.schemas.families.invocation import Unrecognized, argument_names
from kcap.schemas.records import Call
from kcap.schemas.values import Drift, Folded, Group, Opaque, TensorSpec, Value

Path: TypeAlias = "tuple[str | int, ...]"  # an argument's name, then indices into lists


class Tensor(NamedTuple):
    dtype: str
    rank: int
    device: str  # its kind: cpu, cuda
    path: Path


class Number(NamedTuple):
    """A number that may be an input."""

    type: str
    path: Path


class Baked(NamedTuple):
    """A value that is part of the kernel; its type apart, for True, 1 and 1.0 are equal."""

    type: str
    value: Any


Node: TypeAlias = "Tensor | Number | Baked | tuple[Node, ...]"


class Parameter(NamedTuple):
    name: str
    node: Any  # a Node
    keyword: bool
    default: bool
    written: bool


class Pattern(NamedTuple):
    operator: str
    parameters: tuple[Parameter, ...]

    def leaves(self) -> Iterator[tuple[Parameter, Tensor | Number]]:
        """Every tensor and number, in the order of a Member's sizes and numbers."""
        for parameter in self.parameters:
            for leaf in _leaves(parameter.node):
                yield parameter, leaf

    def numbers(self) -> list[Number]:
        return [leaf for _, leaf in self.leaves() if isinstance(leaf, Number)]


@dataclass(frozen=True, slots=True)
class Member:
    """A Call of a pattern: the sizes of all its tensors' dimensions one after another, and its numbers."""

    call: Call
    sizes: tuple[int, ...]
    numbers: tuple[Any, ...]


def _leaves(node: Any) -> Iterator[Tensor | Number]:
    if isinstance(node, Tensor | Number):
        yield node
    elif not isinstance(node, Baked):
        for item in node:
            yield from _leaves(item)


def read(call: Call) -> tuple[Pattern, Member]:
    """`call` apart; Unrecognized with the reason why no Definition can hold it."""
    reader = _Reader(operator(call.operator))
    parameters = []
    for name, argument in zip(argument_names(call), call.args, strict=True):
        if not name.isidentifier() or keyword.iskeyword(name) or name == "torch":
            raise Unrecognized(f"its argument {name[:40]!r} cannot be a name in a reference")
        declared = reader.own.argument(name)
        by_keyword = argument.keyword or bool(declared is not None and declared.kwarg_only)
        written = argument.written or reader.own.writes(name)
        node = reader.node(argument.value, (name,))
        parameters.append(Parameter(name, node, by_keyword, argument.default, written))
    return Pattern(call.operator, tuple(parameters)), Member(call, tuple(reader.sizes), tuple(reader.numbers))


class _Reader:
    def __init__(self, own: Operator) -> None:
        self.own = own
        self.sizes: list[int] = []
        self.numbers: list[Any] = []

    def node(self, value: Value, path: Path) -> Node:
        match value:
            case TensorSpec():
                if value.dtype not in DTYPES:
                    raise Unrecognized(f"a Definition has no dtype {value.dtype}")
                self.sizes += value.shape
                return Tensor(value.dtype, len(value.shape), value.device.split(":")[0], path)
            case list():
                return tuple(self.node(item, (*path, index)) for index, item in enumerate(value))
            case Drift():
                return self._number(value, "number", path)
            case int() | float() if not isinstance(value, bool) and len(path) == 1 and self.own.varies(str(path[0])):
                return self._number(value, type(value).__name__, path)
            case Folded():
                raise Unrecognized(f"its argument {path[0]} names a layer of the engine")
            case Opaque(type=kind):
                raise Unrecognized(f"its argument {path[0]} is opaque ({kind})")
            case Group() | complex():
                raise Unrecognized(f"its argument {path[0]} is no value of a Definition ({type(value).__name__})")
        return Baked(type(value).__name__, repr(value) if value != value else value)

    def _number(self, value: Any, kind: str, path: Path) -> Number:
        self.numbers.append(value)
        return Number(kind, path)

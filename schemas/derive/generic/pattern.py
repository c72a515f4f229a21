"""A Call taken apart: the pattern that all Calls of a group share, and the sizes and numbers of its own.

torch's table of operators says what the arguments are. A name from a file is looked up there as a whole; it is never
split and walked as attributes.

Calls group by operator, by which arguments are tensors (their dtypes, ranks and kinds of device), lists (their
lengths), None, and by every string, bool, dtype and number that decides what is computed.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch

from kcap.schemas.derive.invocation import Unrecognized, argument_names
from kcap.schemas.flashinfer.definition import DTYPES
from kcap.schemas.recording.operators import OperatorError, to_trace, why_not_called
from kcap.schemas.recording.records import Call
from kcap.schemas.recording.values import Drift, Folded, Group, Opaque, TensorSpec, Value

TORCH_NAMESPACES = frozenset(
    {"aten", "prims"}
)  # here an int is a dimension, a size or a mode: it decides what is computed

NUMBERS = frozenset({"number", "float", "Optional[number]", "Optional[float]"})  # a schema's Scalar is a `number`


@dataclass(frozen=True)
class Operator:
    """An operator as it is written in Python (`aten.add.Tensor`). `call` and `schema` are None where torch has none."""

    name: str
    python: str
    schema: Any = None
    call: Callable[..., Any] | None = None
    tags: frozenset[torch.Tag] = frozenset()

    @property
    def namespace(self) -> str:
        return self.name.split("::")[0]

    @property
    def base(self) -> str:
        """Without namespace and overload: `fill_`."""
        return self.name.split("::")[1].split(".")[0]

    @property
    def overload(self) -> str:
        return self.name.partition(".")[2]

    def argument(self, name: str) -> Any:
        """The schema's argument of this name; None without one."""
        return next((a for a in self.arguments if a.name == name), None)

    @property
    def arguments(self) -> list[Any]:
        return list(self.schema.arguments) if self.schema else []

    def writes(self, name: str) -> bool:
        argument = self.argument(name)
        return argument is not None and is_written(argument)

    def varies(self, name: str) -> bool:
        """Whether a number called so may be an input: one that decides neither shapes nor what is computed."""
        argument = self.argument(name)
        kind = str(argument.type) if argument is not None else "number"
        return kind in NUMBERS or (self.namespace not in TORCH_NAMESPACES and kind in ("int", "Optional[int]"))

    def fresh(self) -> list[int]:
        """Which of its returns are new, not an argument that it wrote."""
        return [i for i, returned in enumerate(self.schema.returns) if not is_written(returned)]

    def unsupported_return(self) -> str | None:
        """The type of a return that is no tensor and no list of them."""
        types = [str(self.schema.returns[index].type) for index in self.fresh()]
        return next((kind for kind in types if "Tensor" not in kind), None)


def is_written(argument: Any) -> bool:
    """Whether a schema's argument is written, or a return is such an argument."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


@cache
def registered_operator(name: str) -> Operator:
    """The operator `name` (`aten::add.Tensor`); Unrecognized if no file may name it."""
    try:
        python = to_trace(name)
    except OperatorError as error:
        raise Unrecognized(error.reason) from None
    if reason := why_not_called(name):
        raise Unrecognized(reason)
    base, _, overload = name.partition(".")
    if name not in _registered():
        return Operator(name, python)
    call, _, tags = torch._C._get_operation_overload(base, overload)
    return Operator(name, python, torch._C._get_schema(base, overload), call, frozenset(tags))


@cache
def _registered() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


@cache
def functional_variant(name: str) -> Operator | None:
    """torch's operator that returns what `name` writes: of `aten::add.out` and `aten::add_.Tensor`, `aten::add.Tensor`.

    None where there is none: it takes the same arguments, but for those that `name` writes by keyword only.
    """
    own = registered_operator(name)
    if own.schema is None or own.namespace not in TORCH_NAMESPACES:
        return None
    takes = [(a.name, str(a.type)) for a in own.arguments if not (is_written(a) and a.kwarg_only)]
    base = own.name.split(".")[0].removesuffix("_")
    for schema in torch._C._jit_get_schemas_for_operator(base):
        same = [(a.name, str(a.type)) for a in schema.arguments] == takes
        if same and schema.returns and not any(map(is_written, schema.arguments)):
            return registered_operator(f"{base}.{schema.overload_name}" if schema.overload_name else base)
    return None


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
    """A value that is part of the kernel, with its type, because True, 1 and 1.0 are equal."""

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


def read_pattern(call: Call) -> tuple[Pattern, Member]:
    """`call` taken apart; Unrecognized with the reason why no Definition can hold it."""
    reader = _Reader(registered_operator(call.operator))
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

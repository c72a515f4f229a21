"""What torch's table of registered operators says of one: its arguments, what it returns, its functional variant.

A name from a file is looked up there as a whole; it is never split and walked as attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kcap.schemas.families.invocation import Unrecognized
from kcap.schemas.operators import OperatorError, to_trace, why_not_called

TORCH = frozenset({"aten", "prims"})  # here an int is a dimension, a size or a mode: it decides what is computed
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
        return kind in NUMBERS or (self.namespace not in TORCH and kind in ("int", "Optional[int]"))

    def fresh(self) -> list[int]:
        """Which of its returns are new, not an argument that it wrote."""
        return [i for i, returned in enumerate(self.schema.returns) if not is_written(returned)]

    def strange(self) -> str | None:
        """The type of a return that is no tensor and no list of them."""
        types = [str(self.schema.returns[index].type) for index in self.fresh()]
        return next((kind for kind in types if "Tensor" not in kind), None)


def is_written(argument: Any) -> bool:
    """Whether a schema's argument is written, or a return is such an argument."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


@cache
def operator(name: str) -> Operator:
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
def functional(name: str) -> Operator | None:
    """torch's operator that returns what `name` writes: of `aten::add.out` and `aten::add_.Tensor`, `aten::add.Tensor`.

    None where there is none: it takes the same arguments, but for those that `name` writes by keyword only.
    """
    own = operator(name)
    if own.schema is None or own.namespace not in TORCH:
        return None
    takes = [(a.name, str(a.type)) for a in own.arguments if not (is_written(a) and a.kwarg_only)]
    base = own.name.split(".")[0].removesuffix("_")
    for schema in torch._C._jit_get_schemas_for_operator(base):
        same = [(a.name, str(a.type)) for a in schema.arguments] == takes
        if same and schema.returns and not any(map(is_written, schema.arguments)):
            return operator(f"{base}.{schema.overload_name}" if schema.overload_name else base)
    return None

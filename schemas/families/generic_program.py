"""A reference as a few lines of Python: the operator itself, or the ATen operators that it decomposes into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

from kcap.schemas.families.invocation import Unrecognized

LONGEST = 64  # lines; a longer decomposition explains nothing
INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


class Untraceable(Unrecognized):
    """What the operator does is no program of ATen operators on its inputs."""


@dataclass(frozen=True)
class Name:
    """A value that is written by its name."""

    text: str


@dataclass
class Line:
    targets: list[str]
    uses: set[str]
    text: str


@dataclass
class Program:
    """Lines of Python over values by name; `names` of live tensors by their id, which `kept` keeps theirs."""

    device: str
    names: dict[int, str]
    lines: list[Line] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def write(self, value: Any) -> str:
        """`value` in Python; Untraceable for a tensor that no line made."""
        match value:
            case Name(text=text):
                return text
            case torch.Tensor():
                if id(value) not in self.names:
                    raise Untraceable
                self.used.add(self.names[id(value)])
                return self.names[id(value)]
            case list() | tuple():
                return f"[{', '.join(map(self.write, value))}]"
            case torch.device():
                return self.device
            case float() if value != value or value in (float("inf"), float("-inf")):
                return f'float("{value}")'
            case None | bool() | int() | float() | str() | torch.dtype() | torch.layout() | torch.memory_format():
                return repr(value)
        raise Untraceable

    def call(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> str:
        """A call of the operator `aten.add.Tensor`, with an operator of Python where it has one."""
        texts = [self.write(arg) for arg in args]
        namespace, base, _ = name.split(".")
        if namespace == "aten" and base in INFIX and len(texts) == 2 and not kwargs:
            return f"{texts[0]} {INFIX[base]} {texts[1]}"
        if (dtype := _cast(name, args, kwargs)) is not None:
            return f"{texts[0]}.to({dtype})"
        texts += [f"{key}={self.write(value)}" for key, value in kwargs.items()]
        return f"torch.ops.{name}({', '.join(texts)})"

    def add(self, name: str, args: list[Any], kwargs: dict[str, Any], result: Any) -> None:
        """The line that makes `result`, one tensor or several."""
        self.used = set()
        text = self.call(name, args, kwargs)
        if id(result) in self.names:  # a conversion that had nothing to convert
            return
        made = [result] if isinstance(result, torch.Tensor) else list(result)
        if not made or not all(isinstance(item, torch.Tensor) for item in made) or len(self.lines) == LONGEST:
            raise Untraceable
        targets = [self.names.setdefault(id(item), f"v{len(self.names)}") for item in made]
        self.kept += made
        end = "" if made[0] is result else ","
        self.lines.append(Line(targets, self.used, f"{', '.join(targets)}{end} = {text}"))

    def body(self, returned: list[str]) -> list[str]:
        """The lines that `returned` needs."""
        needed, lines = set(returned), []
        for line in reversed(self.lines):
            if needed & set(line.targets):
                needed |= line.uses
                lines.append(line.text)
        return lines[::-1]


def _cast(name: str, args: list[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype of a call that only converts to it."""
    if name == "aten._to_copy.default" and len(args) == 1 and list(kwargs) == ["dtype"]:
        return kwargs["dtype"]  # type: ignore[no-any-return]
    if name in ("aten.to.dtype", "prims.convert_element_type.default") and len(args) == 2 and not kwargs:
        return args[1]  # type: ignore[no-any-return]
    return None


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return core_aten_decompositions()  # type: ignore[no-any-return]


class Recorder(TorchDispatchMode):
    """Writes what runs below it into `program`, decomposed into core ATen operators."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.core not in func.tags and func in _decompositions():
            with self:
                result = _decompositions()[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        name = str(func)
        if func._schema.is_mutable or not (name.startswith("aten.") or _cast(name, list(args), kwargs)):
            raise Untraceable
        result = func(*args, **kwargs)
        self.program.add(name, list(args), kwargs, result)
        return result

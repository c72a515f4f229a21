"""One @triton.jit function as its source says it: text, decorator, and what its global names mean.

Only modules that are loaded already are asked for, so that reading a kernel imports nothing heavy into the engine.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

DEFINITION = re.compile(r"^def\s+(\w+)\s*\(", re.MULTILINE)
SETTINGS = ("do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")


class Unreadable(Exception):
    """This kernel's source cannot be made a module of its own; `reason` is a plain sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Function:
    """`text` starts with its `def`; `scope` is None where the process that has the globals is another one."""

    name: str
    text: str
    decorator: str
    scope: Mapping[str, Any] | None
    postponed: bool  # its module postpones the evaluation of annotations

    @property
    def block(self) -> str:
        return f"@{self.decorator}\n{self.text}\n"

    def tree(self) -> ast.FunctionDef:
        (node,) = ast.parse(self.text).body
        if not isinstance(node, ast.FunctionDef):
            raise Unreadable(f"the source of {self.name} is no plain function")
        return node


def is_jit(value: object) -> bool:
    """Whether `value` is what @triton.jit (or @triton.constexpr_function) made, compiled or interpreted."""
    return isinstance(value, tuple(_kinds()))


def _kinds() -> Iterator[type]:
    for module, names in {"jit": ("JITCallable", "JITFunction"), "interpreter": ("InterpretedFunction",)}.items():
        loaded = sys.modules.get(f"triton.runtime.{module}")
        yield from (getattr(loaded, name) for name in names if hasattr(loaded, name))


def unwrap(fn: Any) -> Any:
    """The function below autotuners and heuristics; Unreadable if there is none."""
    for _ in range(8):
        if is_jit(fn):
            return fn
        fn = getattr(fn, "fn", None)
    raise Unreadable("it is not a function that @triton.jit made")


def read_function(fn: Any) -> Function:
    """What is known of the function `fn` that @triton.jit made."""
    text = source_text(fn)
    name = DEFINITION.match(text)
    if name is None:
        raise Unreadable("its source does not start with a definition")
    return Function(name[1], text, _decorator(fn), _scope(fn), _postponed(fn.fn))


def source_text(fn: Any) -> str:
    """Its source from `def` on, as Triton keeps it."""
    text = getattr(fn, "src", None) or textwrap.dedent(_file_text(fn.fn))
    start = DEFINITION.search(text)
    if start is None:
        raise Unreadable("its source has no definition")
    return "\n".join(line.rstrip() for line in text[start.start() :].strip().splitlines())


def _file_text(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError) as error:
        raise Unreadable(f"its source is in no file ({error})") from None


def _decorator(fn: Any) -> str:
    kind = type(fn).__name__
    if kind == "ConstexprFunction":
        return "triton.constexpr_function"
    if kind not in ("JITFunction", "InterpretedFunction"):
        raise Unreadable(f"a {kind} is not read yet")
    given = vars(fn) | getattr(fn, "kwargs", {})
    settings = {name: given[name] for name in SETTINGS if given.get(name)}
    text = ", ".join(f"{name}={list(v) if isinstance(v, list | tuple) else v!r}" for name, v in settings.items())
    return f"triton.jit({text})" if text else "triton.jit"


def _scope(fn: Any) -> Mapping[str, Any] | None:
    """Its globals and what it closes over; None where inductor dropped them on the way from a compile worker."""
    function = fn.fn
    if function is None:
        return None
    free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {**function.__globals__, **{name: cell.cell_contents for name, cell in free if _filled(cell)}}


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _postponed(function: Any) -> bool:
    return function is not None and bool(function.__code__.co_flags & annotations.compiler_flag)

"""One @triton.jit function as its source says it: text, decorator, and the names that it takes from outside itself."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from types import ModuleType
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

    def block_named(self, name: str) -> str:
        """Decorator and text, the function called `name`."""
        text = self.text if name == self.name else DEFINITION.sub(f"def {name}(", self.text, count=1)
        return f"@{self.decorator}\n{text}\n"

    def tree(self) -> ast.FunctionDef:
        (node,) = ast.parse(self.text).body
        if not isinstance(node, ast.FunctionDef):
            raise Unreadable(f"the source of {self.name} is no plain function")
        return node


def rename(function: Function, names: Mapping[str, str]) -> Function:
    """`function` with each of these names read as another; its text stays as it is otherwise."""
    if not names:
        return function
    lines = [line.encode() for line in function.text.splitlines()]
    reads = [n for n in ast.walk(function.tree()) if isinstance(n, ast.Name) and n.id in names]
    for node in sorted(reads, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        line, start, end = lines[node.lineno - 1], node.col_offset, node.end_col_offset
        lines[node.lineno - 1] = line[:start] + names[node.id].encode() + line[end:]
    return replace(function, text="\n".join(line.decode() for line in lines))


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
    options = vars(fn) | getattr(fn, "kwargs", {})
    settings = {name: options[name] for name in SETTINGS if options.get(name)}
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


IMPORTED = ("triton", "torch._inductor.runtime")  # packages whose objects are imported, not copied


HELPERS = "torch._inductor.runtime.triton_helpers"


WELL_KNOWN: dict[str, tuple[str, str | None]] = {  # what every module that inductor generates imports
    "triton": ("triton", None),
    "tl": ("triton.language", None),
    "tlx": ("triton.language.extra.tlx", None),
    "triton_helpers": (HELPERS, None),
    "triton_heuristics": ("torch._inductor.runtime.triton_heuristics", None),
    "libdevice": (HELPERS, "libdevice"),
    "tl_math": (HELPERS, "math"),
}


@dataclass
class Names:
    """Names that a function reads from outside. `annotations`: only there; `attributes`: what is read of a name, None
    where the name itself is read too."""

    used: set[str] = field(default_factory=set)
    annotations: set[str] = field(default_factory=set)
    attributes: dict[str, set[str] | None] = field(default_factory=dict)


def names_of(function: ast.FunctionDef) -> Names:
    """The free names of `function`: of its body, its defaults and its annotations."""
    arguments = function.args
    own = {argument.arg for argument in _arguments(arguments)} | set(_stored(function.body))
    defaults = [node for node in (*arguments.defaults, *arguments.kw_defaults) if node is not None]
    names = Names()
    for nodes, hidden in ((function.body, own), (defaults, set[str]())):
        for name, attribute in _reads(nodes):
            if name not in hidden:
                names.used.add(name)
                attributes = names.attributes.setdefault(name, set())
                names.attributes[name] = attributes | {attribute} if attributes is not None and attribute else None
    annotations = [argument.annotation for argument in _arguments(arguments) if argument.annotation]
    annotations += [function.returns] if function.returns else []
    names.annotations = {name for name, _ in _reads(annotations)} - names.used
    return names


def _arguments(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from (argument for argument in (arguments.vararg, arguments.kwarg) if argument)


def _stored(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        for child in ast.walk(node):
            if isinstance(child, ast.Name) and not isinstance(child.ctx, ast.Load):
                yield child.id
            elif isinstance(child, ast.arg):
                yield child.arg
            elif isinstance(child, ast.FunctionDef):
                yield child.name


def _reads(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str | None]]:
    """Each name that is read, with the attribute that is read of it."""
    for node in nodes:
        below = {
            child.value: child.attr
            for child in ast.walk(node)
            if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name)
        }
        for child in ast.walk(node):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load):
                yield child.id, below.get(child)


def well_known(name: str) -> Any:
    """What `name` means in the modules that inductor generates; KeyError if they do not have it."""
    module, attribute = WELL_KNOWN[name]
    imported = importlib.import_module(module)
    return getattr(imported, attribute) if attribute else imported


def import_line(name: str, value: Any) -> str | None:
    """The import that binds `name` to `value`; None where `value` is no module and in no package that is imported."""
    if isinstance(value, ModuleType):
        if value.__name__ == "__main__" or sys.modules.get(value.__name__) is not value:
            raise Unreadable(f"its module '{name}' cannot be imported by name")
        return f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")
    inner = value if getattr(value, "__qualname__", None) else getattr(value, "fn", value)
    module, qualname = getattr(inner, "__module__", None), getattr(inner, "__qualname__", None)
    if not isinstance(module, str) or not any(module == root or module.startswith(f"{root}.") for root in IMPORTED):
        return None
    if not qualname or getattr(sys.modules.get(module), qualname, None) is not value:
        return None
    return f"from {module} import {qualname}" + (f" as {name}" if name != qualname else "")


def expression(value: Any) -> str | None:
    """Python text that makes the literal, constexpr or dtype `value`; None for anything else."""
    if value is None or type(value) in (bool, int, str):
        return repr(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f"float('{value}')"
    if type(value) is tuple:
        items = [expression(item) for item in value]
        return None if None in items else f"({''.join(f'{item}, ' for item in items).rstrip()})"
    core = sys.modules["triton.language.core"]
    if isinstance(value, core.constexpr):
        inner = expression(value.value)
        return inner and f"triton.language.constexpr({inner})"
    return f"triton.language.dtype({value.name!r})" if type(value) is core.dtype else None


def attributes_only(value: Any, attributes: Set[str] | None) -> str | None:
    """A stand-in for an object of which a kernel reads only attributes that are literals (`torch.finfo(…).max`)."""
    if not attributes:
        return None
    items = {name: expression(getattr(value, name, ...)) for name in sorted(attributes)}
    if None in items.values():
        return None
    return f"type('Values', (), {{{', '.join(f'{name!r}: {text}' for name, text in items.items())}}})"

"""The source of a Triton kernel as a Python module of its own: imports, constants, the functions it calls, the kernel.

The text is the same in every process: its order comes from names only, and inductor's numbered names are taken out.
"""

from __future__ import annotations

import builtins
import hashlib
import keyword
import re
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kcap.capture.hooks.identity import ByIdentity
from kcap.capture.taps.kernels.triton_functions import (
    Function,
    Unreadable,
    attributes_only,
    expression,
    import_line,
    is_jit,
    names_of,
    read_function,
    rename,
    unwrap,
    well_known,
)

__all__ = ["Source", "Unreadable", "human_name", "read_source"]

INDUCTOR = re.compile(r"triton_[a-z]+_(fused(?:_\w+?)?)_\d+", re.ASCII)
LONGEST_NAME = 160
MOST_OF_ONE_NAME = 9  # things in one source
POSTPONED = "from __future__ import annotations"


@dataclass(frozen=True)
class Source:
    """`text` runs by itself; `function` is the kernel in it, `name` what people call it."""

    text: str
    function: str
    name: str

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def file(self) -> str:
        """Its name in a Recording's kernels/."""
        return f"{self.digest}.py"

    @property
    def id(self) -> str:
        """The overload in the operator's name, which has to be an identifier."""
        return f"s{self.digest[:8]}"


@dataclass(frozen=True)
class _Known:
    """What was read of a function, or why nothing was; `text` is Triton's own, which may be exchanged."""

    text: str | None
    source: Source | str


_known = ByIdentity[_Known]()  # a JITFunction's hash is costly, and fails once inductor dropped its globals


def read_source(fn: Any) -> Source:
    """The source of the kernel `fn` (a JITFunction, an InterpretedFunction, or an autotuner around one).

    Unreadable says why there is none. Read once for each function.
    """
    kernel = unwrap(fn)
    entry = _known.get(kernel)
    if entry is None or entry.text is not getattr(kernel, "src", None):
        entry = _known[kernel] = _Known(getattr(kernel, "src", None), _read(kernel))
    if isinstance(entry.source, str):
        raise Unreadable(entry.source)
    return entry.source


def _read(kernel: Any) -> Source | str:
    try:
        return _Module().source(read_function(kernel))
    except Unreadable as error:
        return error.reason
    except SyntaxError as error:
        return f"its source is no Python ({error.msg})"


def human_name(function: str) -> str:
    """`triton_poi_fused_mul_silu_slice_1` -> `mul_silu_slice`; other names stay, but for what no operator may have."""
    match = INDUCTOR.fullmatch(function)
    name = (match[1].removeprefix("fused_") or match[1]) if match else function
    return re.sub(r"^(?=\d)|^__+", "_", re.sub(r"\W", "_", name, flags=re.ASCII))[:LONGEST_NAME]


class _Module:
    """The text of one module, as it grows: what each of its names means, and its functions in the order of need."""

    def __init__(self) -> None:
        self.imports = {"triton": "import triton"}
        self.constants: dict[str, str] = {}
        self.functions: dict[str, str] = {}
        self.postponed = False
        self.called: dict[int, str] = {}  # the name of each function that was taken in, by id

    def source(self, kernel: Function) -> Source:
        kernel = self.need(kernel)
        name = human_name(kernel.name)
        function = kernel.name
        if INDUCTOR.fullmatch(kernel.name):
            function = f"{name}_kernel" if self.taken(name) else name
        text = re.sub(r"\Adef\s+\w+", f"def {function}", kernel.text)
        self.put(self.functions, function, f"@{kernel.decorator}\n{text}\n")
        return Source(self.text(), function, name)

    def taken(self, name: str) -> bool:
        names = (*self.imports, *self.constants, *self.functions)
        return name in names or keyword.iskeyword(name) or hasattr(builtins, name)

    def text(self) -> str:
        """Imports, constants, functions."""
        head = [POSTPONED, ""] if self.postponed else []
        head += sorted(self.imports.values())
        constants = [f"{name} = {text}" for name, text in sorted(self.constants.items())]
        blocks = ["\n".join(head) + "\n"] + (["\n".join(constants) + "\n"] if constants else [])
        return "\n".join(blocks) + "".join(f"\n\n{block}" for block in self.functions.values())

    def need(self, function: Function) -> Function:
        """Take in everything that `function` reads from outside; it, with the names that these things have here."""
        self.postponed |= function.postponed
        names = names_of(function.tree())
        renamed = {name: self.take(function, name, names.attributes[name]) for name in sorted(names.used)}
        for name in sorted(names.annotations):
            try:
                renamed[name] = self.take(function, name, None)
            except Unreadable:
                self.postponed = True  # then nobody evaluates it
        return rename(function, {name: new for name, new in renamed.items() if new != name})

    def take(self, function: Function, name: str, attributes: Set[str] | None) -> str:
        """What `name` in `function` is called here."""
        try:
            value = well_known(name) if function.scope is None else function.scope[name]
        except (KeyError, ImportError):
            if hasattr(builtins, name):
                return name
            dropped = " (inductor dropped its globals)" if function.scope is None else ""
            raise Unreadable(f"nothing says what '{name}' in {function.name} is{dropped}") from None
        if line := import_line(name, value):
            self.put(self.imports, name, line)
            return name
        if is_jit(value):
            return self.call(name, value)
        if text := expression(value) or attributes_only(value, attributes):
            new = self.free_name(name, lambda _: text)
            self.put(self.constants, new, text)
            return new
        raise Unreadable(f"its global '{name}' is a {type(value).__name__}, which no source can say")

    def call(self, name: str, value: Any) -> str:
        """A function that is called as `name`, and what it needs before it."""
        helper = read_function(value)
        own = self.called.get(id(value))
        if own is None:
            self.called[id(value)] = helper.name  # it may call itself
            helper = self.need(helper)
            own = self.called[id(value)] = self.free_name(helper.name, helper.block_named)
            self.put(self.functions, own, helper.block_named(own))
        if name == helper.name:
            return own
        alias = self.free_name(name, lambda new: f"{new} = {own}\n")
        self.put(self.functions, alias, f"{alias} = {own}\n")
        return alias

    def free_name(self, name: str, text: Callable[[str], str]) -> str:
        """`name`, with a number where something else is called so; `text`: what it means, by the name that it has."""
        tables = (self.imports, self.constants, self.functions)
        candidates = (name, *(f"{name}__{number}" for number in range(2, MOST_OF_ONE_NAME)))
        for candidate in candidates:
            if all(table.get(candidate, text(candidate)) == text(candidate) for table in tables):
                return candidate
        raise Unreadable(f"too many different things are called '{name}' in it and in what it calls")

    def put(self, table: dict[str, str], name: str, text: str) -> None:
        """Give `name` its meaning; Unreadable if it has another one already."""
        for definitions in (self.imports, self.constants, self.functions):
            if definitions.get(name, text) != text:
                raise Unreadable(f"two different things are called '{name}' in it and in what it calls")
        table[name] = text

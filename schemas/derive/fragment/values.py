"""The values in a graph fragment of inductor, read by a grammar: `[%arg0_1, (s72//2) + 1, torch.float32, cpu]`.

torch.fx writes them (`torch.fx.node._format_arg`): strings have no quotes, sizes are printed by sympy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.values import TorchConstant

DEEPEST = 32
LONGEST_SIZE = 128  # tokens after the first
SYMBOL = re.compile(r"(?:s|u|ps|zuf|zf)\d+", re.ASCII)
FUNCTIONS = {"Max": "max", "Min": "min"}
_TOKEN = re.compile(
    r"\s*(?:(?P<ref>%[A-Za-z_]\w*)|(?P<torch>torch(?:\.[A-Za-z_]\w*)+)|(?P<device>(?:cpu|cuda|meta)\b(?::\d+)?)"
    r"|(?P<float>\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+|\b(?:inf|nan)\b)|(?P<int>\d{1,20})|(?P<word>[A-Za-z_]\w*(?::\w+)*)"
    r"|(?P<mark>//|\*\*|[-+*%()\[\]{},:]))",
    re.ASCII,
)
_BINDS = {"+": 1, "-": 1, "*": 2, "//": 2, "%": 2}
_TORCH = {
    "strided": "layout",
    "contiguous_format": "memory_format",
    "preserve_format": "memory_format",
    **dict.fromkeys(BY_NAME, "dtype"),
}


class FragmentError(ValueError):
    """What of a fragment is not understood."""


@dataclass(frozen=True)
class Ref:
    """The value of the node called `name`."""

    name: str


@dataclass(frozen=True)
class Size:
    """A size that holds symbols: a symbol, or an operation (`+ - * // % Max Min`) on integers and Sizes."""

    operation: str
    operands: tuple[Size | int, ...] = ()

    def symbols(self) -> list[str]:
        """The symbols in it, in their order."""
        if not self.operands:
            return [self.operation]
        return [symbol for part in self.operands if isinstance(part, Size) for symbol in part.symbols()]

    def text(self, names: Mapping[str, str]) -> str:
        """It as Python writes it, the symbols by their `names`."""
        parts = [part.text(names) if isinstance(part, Size) else str(part) for part in self.operands]
        if not parts:
            return names[self.operation]
        if self.operation in FUNCTIONS:
            return f"{FUNCTIONS[self.operation]}({', '.join(parts)})"
        return f"({f' {self.operation} '.join(parts)})"


@dataclass(frozen=True)
class Word:
    """A string argument."""

    text: str


FragmentValue: TypeAlias = "Ref | Size | Word | TorchConstant | bool | int | float | list[FragmentValue] | None"


def size_of(size: Size | int, symbols: Mapping[str, int]) -> int | None:
    """The number that `size` is with these `symbols`; None where one is missing, or a divisor is zero."""
    if isinstance(size, int):
        return size
    if not size.operands:
        return symbols.get(size.operation)
    parts = [size_of(part, symbols) for part in size.operands]
    numbers = [part for part in parts if part is not None]
    return _operate(size.operation, numbers) if len(numbers) == len(parts) else None


def _operate(operation: str, parts: list[int]) -> int | None:
    if operation in ("Max", "Min"):
        return max(parts) if operation == "Max" else min(parts)
    left, right = parts
    if operation in ("//", "%"):
        return None if right == 0 else left // right if operation == "//" else left % right
    return left + right if operation == "+" else left - right if operation == "-" else left * right


class Parser:
    """Reads values from `text`, which may hold nothing else; FragmentError says where it does."""

    def __init__(self, text: str) -> None:
        self.tokens = list(_tokens(text))
        self.place = 0

    def whole(self, tuples: bool = False) -> FragmentValue:
        """All of the text as one value; `tuples`: a tuple also where it has one item and no comma."""
        value = self.items(")", 0)[0] if tuples and self.skip("(") else self.value()
        if not self.ended():
            raise FragmentError(f"'{self.peek()}' after the end of a value")
        return value

    def ended(self) -> bool:
        return self.place == len(self.tokens)

    def peek(self) -> str:
        return "" if self.ended() else self.tokens[self.place][1]

    def take(self) -> tuple[str, str]:
        if self.ended():
            raise FragmentError("a value breaks off")
        self.place += 1
        return self.tokens[self.place - 1]

    def skip(self, mark: str) -> bool:
        if self.peek() != mark:
            return False
        self.place += 1
        return True

    def items(self, end: str, depth: int) -> tuple[list[FragmentValue], bool]:
        """The values up to the mark `end`, and whether a comma follows the last."""
        values: list[FragmentValue] = []
        comma = False
        while not self.skip(end):
            if values and not comma:
                raise FragmentError(f"'{self.peek()}' where a comma was due")
            values.append(self.value(depth + 1))
            comma = self.skip(",")
        return values, comma

    def mapping(self) -> dict[str, FragmentValue]:
        """`{name: value, …}`."""
        if not self.skip("{"):
            raise FragmentError("no keyword arguments")
        values: dict[str, FragmentValue] = {}
        while not self.skip("}"):
            kind, name = self.take()
            if kind != "word" or not self.skip(":"):
                raise FragmentError(f"'{name[:20]}' is no keyword")
            values[name] = self.value(1)
            if not self.skip(",") and self.peek() != "}":
                raise FragmentError(f"'{self.peek()}' where a comma was due")
        return values

    def value(self, depth: int = 0, binds: int = 0) -> FragmentValue:
        """One value, with the operators after it that bind closer than `binds`."""
        if depth > DEEPEST:
            raise FragmentError(f"nested more than {DEEPEST} deep")
        left = self._single(depth)
        first = self.place
        while _BINDS.get(self.peek(), 0) > binds:
            if self.place - first > LONGEST_SIZE:
                raise FragmentError("an expression is too long")
            operation = self.take()[1]
            left = _joined(operation, left, self.value(depth + 1, _BINDS[operation]))
        return left

    def _single(self, depth: int) -> FragmentValue:
        kind, text = self.take()
        if kind == "mark":
            return self._marked(text, depth)
        if kind == "word" and text in FUNCTIONS and self.skip("("):
            return Size(text, tuple(_size(item) for item in self.items(")", depth)[0]))
        return _plain(kind, text)

    def _marked(self, mark: str, depth: int) -> FragmentValue:
        if mark == "-":
            value = self.value(depth + 1, 3)
            return -value if isinstance(value, int | float) else _joined("*", -1, value)
        if mark == "[":
            return self.items("]", depth)[0]
        if mark == "(":
            values, comma = self.items(")", depth)
            return values[0] if len(values) == 1 and not comma else values
        raise FragmentError(f"'{mark}' where a value was due")


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise FragmentError(f"{text[position : position + 20]!r} is none of the values known")
        position = match.end()
        yield str(match.lastgroup), match[str(match.lastgroup)]


def _plain(kind: str, text: str) -> FragmentValue:
    if kind == "ref":
        return Ref(text[1:])
    if kind == "int":
        return int(text)
    if kind == "float":
        return float(text)
    if kind == "device":
        return TorchConstant("device", text)
    if kind == "torch":
        return _torch_constant(text.removeprefix("torch."))
    constants: dict[str, FragmentValue] = {"None": None, "True": True, "False": False}
    return constants[text] if text in constants else Size(text) if SYMBOL.fullmatch(text) else Word(text)


def _torch_constant(name: str) -> TorchConstant:
    if name not in _TORCH:
        raise FragmentError(f"torch.{name[:40]} is none of the constants known")
    return TorchConstant(_TORCH[name], name)


def _size(value: FragmentValue) -> Size | int:
    if isinstance(value, Size) or type(value) is int:
        return value
    raise FragmentError("an operation on what is no size")


def _joined(operation: str, left: FragmentValue, right: FragmentValue) -> FragmentValue:
    return Size(operation, (_size(left), _size(right)))

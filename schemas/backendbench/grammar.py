"""The grammar of serialized arguments: `((args…), {'name': value})`, read by recursive descent, never evaluated.

    arguments  = "(" sequence "," "{" [pair {"," pair}] "}" ")"
    pair       = string ":" value
    value      = atom [("+" | "-") imaginary]
    atom       = ["-" | "+"] number | string | word | call | sequence
    sequence   = "[" [value {"," value}] "]" | "(" [value {"," value}] ")"
    call       = word "(" [argument {"," argument}] ")"
    argument   = [word "="] value
    word       = a name with dots: f16, None, inf, torch.strided

`(x)` is x, as in Python; `(x,)` is a list of one. A comma may follow the last item. Calls are those of `CALLS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from kcap.errors import FormatError
from kcap.schemas.backendbench.calls import CALLS, tensor
from kcap.schemas.backendbench.lexer import (
    CONSTANTS,
    DTYPE_WORDS,
    END,
    INTEGER_LIST,
    LITERALS,
    NUMBER,
    PUNCTUATION,
    QUOTED_DEVICE,
    STRING,
    WORD,
    Cursor,
    Fault,
    parse_number,
    parse_string,
)
from kcap.schemas.backendbench.line import MAX_DEPTH, MIN_INT
from kcap.schemas.recording.values import TensorSpec, TorchConstant, Value

PLAIN_TENSOR = re.compile(
    rf"T\(\[({INTEGER_LIST})?\], ([a-z0-9]+)(?:, (?:stride=)?[(\[]({INTEGER_LIST}),?[)\]])?\)", re.ASCII
)
IMAGINARY = {"infj": complex(0, float("inf")), "nanj": complex(0, float("nan"))}
MAX_CACHED = 16384
Key = tuple[str, int]
_tensors: dict[Key, TensorSpec] = {}


def parse_arguments(text: str, place: str = "<arguments>") -> tuple[list[Value], dict[str, Value]]:
    """The positional and keyword arguments that `text` writes; FormatError with line (1) and column."""
    try:
        return Parser(text).arguments()
    except Fault as fault:
        raise FormatError(f"{place}:1:{fault.offset + 1}", fault.reason) from None


class Parser(Cursor):
    """Makes Values of the tokens ahead; `storages` numbers the tensors in order of appearance."""

    __slots__ = ("storages",)

    def __init__(self, text: str, position: int = 0) -> None:
        super().__init__(text, position)
        self.storages = 0

    def arguments(self) -> tuple[list[Value], dict[str, Value]]:
        self._expect("(")
        start = self.start
        args = self.value(1)
        if not isinstance(args, list):
            raise Fault(start, "the positional arguments must be a tuple: one argument is written (x,)")
        self._expect(",")
        if self.text.startswith("{})", self.start) and self.start + 3 == len(self.text):
            return args, {}
        kwargs = self._keywords()
        if self.token == ",":
            self._next()
        self._expect(")")
        if self.kind != END:
            raise self._fault("the end of the line")
        return args, kwargs

    def _keywords(self) -> dict[str, Value]:
        self._expect("{")
        keywords: dict[str, Value] = {}
        while self.token != "}":
            name, start = self._keyword()
            if name in keywords:
                raise Fault(start, f"{name[:40]} is given twice")
            self._expect(":")
            keywords[name] = self.value(2)
            self._separator("}")
        self._next()
        return keywords

    def _keyword(self) -> tuple[str, int]:
        start, token = self.start, self.token
        if self.kind != STRING:
            raise self._fault("a quoted name")
        name = token[1:-1]
        if not name.isidentifier() or not name.isascii() or name in DTYPE_WORDS:
            raise Fault(start, "a keyword must be a name")
        self._next()
        return name, start

    def value(self, depth: int) -> Value:
        value = _READERS[self.kind](self, depth)
        if self.kind == PUNCTUATION and self.token in "+-":
            return self._complex(value)
        return value

    def _complex(self, real: Value) -> Value:
        sign, start = -1 if self.token == "-" else 1, self.start
        self._next()
        imaginary = self._literal()
        if isinstance(real, bool) or not isinstance(real, int | float) or not isinstance(imaginary, complex):
            raise Fault(start, "arithmetic is not read; only complex numbers join two numbers")
        return complex(real, sign * imaginary.imag)

    def _tensor(self, depth: int) -> Value:
        spec = _tensors.get((self.token, self.storages)) or self._plain_tensor()
        if spec is not None:
            self.storages += 1
            self._next()
            return spec
        self.kind, self.token, self.position = WORD, "T", self.start + 1
        return self._word(depth)

    def _plain_tensor(self) -> TensorSpec | None:
        """The tensor ahead, if it is in the usual form: the general grammar reads it too, but slower."""
        match = PLAIN_TENSOR.fullmatch(self.token)
        if match is None or match[2] not in DTYPE_WORDS:
            return None
        positional = [_split(match[1]), DTYPE_WORDS[match[2]], match[3] and _split(match[3])]
        try:
            spec = tensor(positional, {}, self.storages)
        except ValueError as error:
            raise Fault(self.start, str(error)) from None
        _remember((self.token, self.storages), spec)
        return spec

    def _integers(self, depth: int) -> Value:
        if depth >= MAX_DEPTH:
            raise self._too_deep()
        integers = _split(self.token[1:-1])
        self._next()
        return integers

    def _number(self, depth: int) -> Value:
        return self._literal()

    def _literal(self) -> int | float | complex:
        """An unsigned number, or `inf` or `nan`."""
        constant = IMAGINARY.get(self.token) or LITERALS.get(self.token)
        try:
            number = parse_number(self.token) if self.kind == NUMBER else constant
        except ValueError as error:
            raise Fault(self.start, str(error)) from None
        if number is None or isinstance(number, bool):
            raise self._fault("a number")
        self._next()
        return number

    def _signed(self) -> Value:
        negative, start = self.token == "-", self.start
        self._next()
        number = self._literal()
        if negative and isinstance(number, int) and -number < MIN_INT:
            raise Fault(start, "the integer does not fit 64 bits")
        return -number if negative else number

    def _string(self, depth: int) -> Value:
        start, token = self.start, self.token
        try:
            string = parse_string(token)
        except ValueError as error:
            raise Fault(start, str(error)) from None
        self._next()
        if device := QUOTED_DEVICE.fullmatch(string):
            return TorchConstant("device", device[1])
        return DTYPE_WORDS.get(string, string) if token[0] == "'" else string

    def _word(self, depth: int) -> Value:
        start, word = self.start, self.token
        self._next()
        if self.token == "(":
            return self._call(word, start, depth)
        if word in LITERALS:
            return LITERALS[word]
        if word not in CONSTANTS:
            raise Fault(start, f"unknown word {word[:80]!r}")
        return CONSTANTS[word]

    def _call(self, word: str, start: int, depth: int) -> Value:
        make = CALLS.get(word)
        if make is None:
            raise Fault(start, f"unknown function {word[:80]!r}: nothing in a trace file is run")
        self._next()
        positional: list[Value] = []
        keywords: dict[str, Value] = {}
        while self.token != ")":
            self._argument(positional, keywords, depth)
        source = self.text[start : self.position]
        self._next()
        try:
            value = make(positional, keywords, source, self.storages)
        except ValueError as error:
            raise Fault(start, str(error)) from None
        self.storages += isinstance(value, TensorSpec)
        return value

    def _argument(self, positional: list[Value], keywords: dict[str, Value], depth: int) -> None:
        start, word, kind = self.start, self.token, self.kind
        if kind == WORD and self.text[self.position : self.position + 1] == "=":
            self._next()
            self._next()
            if word in keywords:
                raise Fault(start, f"{word[:40]} is given twice")
            keywords[word] = self._deeper(depth)
        elif keywords:
            raise self._fault("a keyword")
        else:
            positional.append(self._deeper(depth))
        self._separator(")")

    def _deeper(self, depth: int) -> Value:
        if depth >= MAX_DEPTH:
            raise self._too_deep()
        return self.value(depth + 1)

    def _too_deep(self) -> Fault:
        return Fault(self.start, f"nested more than {MAX_DEPTH} deep")

    def _punctuation(self, depth: int) -> Value:
        token = self.token
        if token in "+-":
            return self._signed()
        if token == "{":
            raise Fault(self.start, "a dictionary holds keyword arguments only")
        if token != "(":
            raise self._fault("a value")
        return self._sequence(")", depth)

    def _opening(self, depth: int) -> Value:
        return self._sequence("]", depth)

    def _sequence(self, closing: str, depth: int) -> Value:
        if depth >= MAX_DEPTH:
            raise self._too_deep()
        self._next()
        items: list[Value] = []
        while self.token != closing:
            items.append(self.value(depth + 1))
            if closing == ")" and self.token == ")" and len(items) == 1:
                self._next()
                return items[0]
            self._separator(closing)
        self._next()
        return items

    def _unexpected(self, depth: int) -> Value:
        raise self._fault("a value")


def _split(integers: str | None) -> list[Value]:
    return [int(item) for item in integers.split(",")] if integers else []


def _remember(key: Key, spec: TensorSpec) -> None:
    if len(_tensors) >= MAX_CACHED:
        _tensors.clear()
    _tensors[key] = spec


_READERS: tuple[Callable[[Parser, int], Value], ...] = (
    Parser._unexpected,  # no kind is 0
    Parser._punctuation,
    Parser._tensor,
    Parser._integers,
    Parser._number,
    Parser._word,
    Parser._string,
    Parser._opening,
    Parser._unexpected,
    Parser._unexpected,
)

"""The tokens of serialized arguments: punctuation, words, numbers and strings, read without Python."""

from __future__ import annotations

import re

from kcap.schemas.backendbench.line import MAX_INT, MIN_INT
from kcap.schemas.recording.dtypes import BY_NAME, BY_WORD
from kcap.schemas.recording.values import TorchConstant


class Fault(ValueError):
    """What is wrong with a text, and where in it."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset
        self.reason = reason


LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged", "_mkldnn")
MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")

ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "chalf": "complex32",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "short": "int16",
    "int": "int32",
    "long": "int64",
}

DEVICE = re.compile(r"[a-z]{1,16}(?::\d{1,3})?", re.ASCII)
QUOTED_DEVICE = re.compile(r"torch\.device\('([a-z]{1,16}(?::\d{1,3})?)'\)", re.ASCII)
DTYPE_WORDS = {word: TorchConstant("dtype", dtype.name) for word, dtype in BY_WORD.items()}

TORCH = (
    {name: TorchConstant("dtype", name) for name in BY_NAME}
    | {alias: TorchConstant("dtype", name) for alias, name in ALIASES.items()}
    | {name: TorchConstant("layout", name) for name in LAYOUTS}
    | {name: TorchConstant("memory_format", name) for name in MEMORY_FORMATS}
)

CONSTANTS = (
    DTYPE_WORDS | {f"torch.{name}": value for name, value in TORCH.items()} | {f"th.{n}": v for n, v in TORCH.items()}
)

LITERALS: dict[str, bool | float | None] = {
    "None": None,
    "True": True,
    "False": False,
    "inf": float("inf"),
    "nan": float("nan"),
}


def constant_text(value: TorchConstant) -> str | None:
    """How the trace file writes a torch object; None where it has no way."""
    if value.kind == "device":
        return f"torch.device('{value.name}')" if DEVICE.fullmatch(value.name) else None
    word = BY_NAME[value.name].word if value.kind == "dtype" and value.name in BY_NAME else None
    return word or (f"torch.{value.name}" if TORCH.get(value.name) == value else None)


LONGEST_NUMBER = 400

SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""} | {
    char: char for char in "\\'\""
}

ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[0-7]{1,3}|.)", re.DOTALL)


def parse_number(text: str) -> int | float | complex:
    """The number that `text` (a number's token) writes; ValueError says why it is refused."""
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(text)} characters")
    if text[-1] in "jJ":
        return complex(0.0, float(text[:-1]))
    if text.isdigit():
        return _integer(text)
    return float(text)


def _integer(text: str) -> int:
    if len(text) > 1 and text[0] == "0":
        raise ValueError("an integer may not begin with 0")
    return check_integer(int(text))


def check_integer(value: int) -> int:
    """`value`, if it fits 64 bits."""
    if not MIN_INT <= value <= MAX_INT:
        raise ValueError("the integer does not fit 64 bits")
    return value


def parse_string(text: str) -> str:
    """The string that a token with its quotes writes."""
    body = text[1:-1]
    return ESCAPE.sub(_unescape, body) if "\\" in body else body


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if code in SIMPLE:
        return SIMPLE[code]
    if code[0] in "xuU" and len(code) > 1:
        return _character(int(code[1:], 16))
    if code[0] in "01234567":
        return _character(int(code, 8))
    if code in ("x", "u", "U", "N"):
        raise ValueError(f"a broken escape: \\{code}")
    return match[0]


def _character(code: int) -> str:
    if code > 0x10FFFF:
        raise ValueError("an escape beyond Unicode")
    return chr(code)


def quote(value: str) -> str:
    """A string's token in ASCII. BackendBench takes `'f16'` for a dtype anywhere in a line, inside strings too, so a
    quotation mark inside one is always an escape."""
    return "'" + value.encode("unicode_escape").decode("ascii").replace("'", r"\x27") + "'"


PUNCTUATION, TENSOR, INTEGERS, NUMBER, WORD, STRING, OPENING, OTHER, END = range(1, 10)
INTEGER_LIST = r"-?(?:0|[1-9][0-9]{0,17})(?:,[ ]?-?(?:0|[1-9][0-9]{0,17}))*+"

TOKEN = re.compile(
    rf"""[ \t]*+(?:
    ([,()\]{{}}:=+-])
    | (T\([^()'"]{{1,128}}+(?:\([^()'"]{{0,128}}+\)[^()'"]{{0,32}}+)?\))  # a whole tensor
    | (\[{INTEGER_LIST}\])
    | ((?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?[jJ]?)
    | ([A-Za-z_][A-Za-z0-9_]*+(?:\.[A-Za-z_][A-Za-z0-9_]*+)*+)
    | ('(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")
    | (\[)
    | (.)
    | (\Z))""",
    re.VERBOSE | re.DOTALL,
)


class Cursor:
    """A place in a text; `kind`, `token` and `start` are of the token ahead, `position` is behind it."""

    __slots__ = ("kind", "position", "start", "text", "token")

    def __init__(self, text: str, position: int = 0) -> None:
        self.text = text
        self.position = position
        self._next()

    def _next(self) -> None:
        match = TOKEN.match(self.text, self.position)
        assert match is not None and match.lastindex is not None
        self.kind = match.lastindex
        self.token = match[self.kind]
        self.position = match.end()
        self.start = self.position - len(self.token)

    def _fault(self, wanted: str) -> Fault:
        if self.kind == OTHER and self.token in "'\"":
            return Fault(self.start, "a string without its end")
        token = repr(self.token[:40]) if self.kind != END else "the end of the line"
        return Fault(self.start, f"expected {wanted}, found {token}")

    def _expect(self, token: str) -> None:
        if self.token != token:
            raise self._fault(f"'{token}'")
        self._next()

    def _separator(self, closing: str) -> None:
        if self.token == ",":
            self._next()
        elif self.token != closing:
            raise self._fault(f"',' or '{closing}'")

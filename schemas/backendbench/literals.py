"""Python's literals, read without Python: numbers that fit 64 bits, and strings with their escapes."""

from __future__ import annotations

import re

from kcap.schemas.backendbench.line import MAX_INT, MIN_INT

LONGEST_NUMBER = 400
SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""} | {
    char: char for char in "\\'\""
}
ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[0-7]{1,3}|.)", re.DOTALL)


def number(text: str) -> int | float | complex:
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


def string(text: str) -> str:
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

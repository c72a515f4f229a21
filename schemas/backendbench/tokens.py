"""The tokens of serialized arguments, taken one by one from a text."""

from __future__ import annotations

import re

from kcap.schemas.backendbench.calls import Fault

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
        found = repr(self.token[:40]) if self.kind != END else "the end of the line"
        return Fault(self.start, f"expected {wanted}, found {found}")

    def _expect(self, token: str) -> None:
        if self.token != token:
            raise self._fault(f"'{token}'")
        self._next()

    def _separator(self, closing: str) -> None:
        if self.token == ",":
            self._next()
        elif self.token != closing:
            raise self._fault(f"',' or '{closing}'")

"""Packs the arguments of a call from Python for the native recorder: a kind and a word for each value.

Tensors go by address, so that the recorder looks at them as it does at the dispatcher's; what has no kind of its own
goes as text, numbered once.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import torch

from kcap.capture.taps.arguments import encode

# Kind in native/external.h.
NONE, INTEGER, REAL, BOOLEAN, TENSOR, TEXT, LIST = range(7)
WORDS = {type(None): NONE, int: INTEGER, float: REAL, bool: BOOLEAN}
MOST_ROWS = 1 << 12
MOST_TEXTS = 1 << 16
LONGEST_TEXT = LONGEST_LIST = 4096
MOST_VALUES = 1 << 16  # of one call, those in lists among them
DEEPEST = 24  # lists in lists
JSON_MARK = b"\x01"  # before what is JSON already, as in native/json.h


@dataclass(frozen=True)
class _Row:
    """How values of certain types are packed all at once."""

    kinds: bytes
    _pack: Callable[..., bytes]
    _tensors: tuple[int, ...]
    _nones: tuple[int, ...]

    def words(self, values: Sequence[Any]) -> bytes:
        row = list(values)
        for place in self._tensors:
            row[place] = row[place]._cdata
        for place in self._nones:
            row[place] = 0
        return self._pack(*row)


def _row(types: Sequence[type]) -> _Row | None:
    """None where a value of one of the types may take more than a word."""
    kinds = [TENSOR if issubclass(kind, torch.Tensor) else WORDS.get(kind) for kind in types]
    if None in kinds:
        return None
    pack = struct.Struct("".join("d" if kind == REAL else "q" for kind in kinds)).pack
    places = [tuple(i for i, kind in enumerate(kinds) if kind == wanted) for wanted in (TENSOR, NONE)]
    return _Row(bytes(kind for kind in kinds if kind is not None), pack, *places)


class Packer:
    """`number(text)` gives a text its number in the recorder."""

    def __init__(self, number: Callable[[bytes], int]) -> None:
        self._number = number
        self._texts: dict[bytes, int] = {}
        self._rows: dict[tuple[type, ...], _Row | None] = {}  # by the types of values; None: they are packed one by one

    def __call__(self, values: Sequence[Any]) -> tuple[bytes, bytes]:
        """A byte for each value, lists' among them, and a word."""
        types = tuple(map(type, values))
        row = self._rows.get(types)
        if row is None and types not in self._rows and len(self._rows) < MOST_ROWS:
            row = self._rows[types] = _row(types)
        try:
            return (row.kinds, row.words(values)) if row is not None else self._one_by_one(values)
        except struct.error:  # an integer of more than a word
            return self._one_by_one(values)

    def _one_by_one(self, values: Sequence[Any]) -> tuple[bytes, bytes]:
        kinds, words = bytearray(), array("q")
        for value in values:
            self._put(kinds, words, value)
        return bytes(kinds), words.tobytes()

    def _put(self, kinds: bytearray, words: array[int], value: Any, depth: int = 0) -> None:
        if isinstance(value, torch.Tensor):
            kinds.append(TENSOR)
            words.append(value._cdata)
        elif value is None:
            kinds.append(NONE)
            words.append(0)
        elif type(value) is int and -(1 << 63) <= value < 1 << 63:
            kinds.append(INTEGER)
            words.append(value)
        else:
            self._put_rare(kinds, words, value, depth)

    def _put_rare(self, kinds: bytearray, words: array[int], value: Any, depth: int) -> None:
        if isinstance(value, bool):
            kinds.append(BOOLEAN)
            words.append(value)
        elif isinstance(value, float):
            kinds.append(REAL)
            words.append(struct.unpack("q", struct.pack("d", value))[0])
        elif isinstance(value, list | tuple) and _fits(value, len(kinds), depth):
            kinds.append(LIST)
            words.append(len(value))
            for item in value:
                self._put(kinds, words, item, depth + 1)
        else:
            kinds.append(TEXT)
            words.append(self._text(_plain(value) if isinstance(value, str) else _json(value)))

    def _text(self, text: bytes) -> int:
        if text not in self._texts:
            if len(self._texts) >= MOST_TEXTS:
                text = TOO_MANY
            if text not in self._texts:
                self._texts[text] = self._number(text)
        return self._texts[text]


def _fits(value: Sequence[Any], before: int, depth: int) -> bool:
    return len(value) <= LONGEST_LIST and before + len(value) <= MOST_VALUES and depth < DEEPEST


def _plain(value: str) -> bytes:
    """Text as it is; as JSON where C would end it early or take it for JSON."""
    text = value.encode(errors="replace")
    if len(text) > LONGEST_TEXT:
        return _opaque("str")
    return _json(text.decode()) if b"\0" in text or text.startswith(JSON_MARK) else text


def _json(value: Any) -> bytes:
    if isinstance(value, list | tuple):  # too long, or too deep
        return _opaque("list")
    return JSON_MARK + orjson.dumps(encode(value, {}))


def _opaque(kind: str) -> bytes:
    return JSON_MARK + orjson.dumps({"opaque": kind})


TOO_MANY = _opaque("text")

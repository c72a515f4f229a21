"""Packs the arguments of a call from Python for the native recorder: a kind and a word for each value.

Tensors go by address, so that the recorder looks at them as it does at the dispatcher's; what has no kind of its own
goes as text, numbered once.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import orjson
import torch

from kcap.capture.taps.arguments import encode

# Kind in native/external.h.
NONE, INTEGER, REAL, BOOLEAN, TENSOR, TEXT, LIST = range(7)
MOST_TEXTS = 1 << 16
LONGEST_LIST = 4096
JSON_MARK = b"\x01"  # before what is JSON already, as in native/json.h


class Packer:
    """`number(text)` gives a text its number in the recorder."""

    def __init__(self, number: Callable[[bytes], int]) -> None:
        self._number = number
        self._texts: dict[bytes, int] = {}

    def __call__(self, values: Sequence[Any]) -> tuple[bytearray, array[int]]:
        kinds, words = bytearray(), array("q")
        for value in values:
            self._put(kinds, words, value)
        return kinds, words

    def _put(self, kinds: bytearray, words: array[int], value: Any) -> None:
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
            self._put_rare(kinds, words, value)

    def _put_rare(self, kinds: bytearray, words: array[int], value: Any) -> None:
        if isinstance(value, bool):
            kinds.append(BOOLEAN)
            words.append(value)
        elif isinstance(value, float):
            kinds.append(REAL)
            words.append(struct.unpack("q", struct.pack("d", value))[0])
        elif isinstance(value, list | tuple) and len(value) <= LONGEST_LIST:
            kinds.append(LIST)
            words.append(len(value))
            for item in value:
                self._put(kinds, words, item)
        else:
            kinds.append(TEXT)
            words.append(self._text(value.encode() if isinstance(value, str) else _json(value)))

    def _text(self, text: bytes) -> int:
        number = self._texts.get(text)
        if number is None:
            if len(self._texts) >= MOST_TEXTS:
                text = JSON_MARK + b'{"opaque":"text"}'
            number = self._texts[text] = self._number(text)
        return number


def _json(value: Any) -> bytes:
    return JSON_MARK + orjson.dumps(encode(value, {}))

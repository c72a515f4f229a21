"""The native recorder: built at its first use; what it does not read from Python's objects itself is packed for it."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch

from kcap.capture.recorder.arguments import encode
from kcap.capture.recorder.recorder import Ranges
from kcap.capture.recorder.sampled_arguments import NAME_GROUPS
from kcap.system import native_build

SOURCE = Path(__file__).with_name("dispatcher.cpp")


def build() -> Path:
    """The compiled recorder; Unavailable if it cannot be had."""
    return native_build.build([SOURCE, *sorted(SOURCE.parent.glob("native/*.h"))])


class NativeRecorder:
    """The native recorder of this process (there is one). What may write to disk releases the GIL."""

    kind = "RecordFunction"
    sees_graphs = True

    def __init__(self, stem: Path, keep_tokens: bool = False, fail_after: int = -1) -> None:
        path = self.library = str(build())
        self._lib, self._quick = ctypes.CDLL(path), ctypes.PyDLL(path)
        self._lib.kcap_step_end.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p]
        self._lib.kcap_fail_after.argtypes = [ctypes.c_int64]
        _declare(self._quick)
        packer = Packer(lambda text: int(self._quick.kcap_text(text)))
        of_python = self._quick.kcap_python_function  # no ctypes in what is called for each call or launch
        self.call: Callable[[int, int, Sequence[Any], bool, bool], bool] = of_python(
            b"call", (torch.Tensor, "_cdata", packer)
        )
        self.may_record: Callable[[bool], bool] = of_python(b"may_record", None)
        self.leave: Callable[[], None] = of_python(b"leave", None)
        self.graph_launching: Callable[[int], bool] = of_python(b"graph_launching", None)
        names = (ctypes.c_char_p * len(NAME_GROUPS))(*(" ".join(sorted(group)).encode() for group in NAME_GROUPS))
        if self._lib.kcap_open(str(stem).encode(), names, int(keep_tokens)):
            reason = self.error
            if reason:
                self._lib.kcap_close()
            raise RuntimeError(reason or "this process records already")
        self._lib.kcap_fail_after(fail_after)

    @property
    def error(self) -> str:
        """Why it stopped by itself; empty while it is well."""
        return (self._quick.kcap_error() or b"").decode(errors="replace")

    def start(self, loose: bool) -> None:
        self._lib.kcap_start(int(loose))

    def stop(self) -> None:
        self._lib.kcap_stop()

    def step_begin(self, phase: int, sampled: bool = True, slot: int = -1) -> None:
        self._quick.kcap_step_begin(phase, int(sampled), slot)

    def step_pause(self) -> None:
        self._quick.kcap_step_pause()

    def step_resume(self) -> None:
        self._quick.kcap_step_resume()

    def step_end(self, tokens: int, sequences: int, details: bytes) -> None:
        self._lib.kcap_step_end(tokens, sequences, details)

    def step_program(self) -> int:
        return int(self._quick.kcap_step_program())

    def operator(self, name: str, arguments: Sequence[str], work: bool, region: bool = False) -> int:
        return int(self._quick.kcap_operator(name.encode(), " ".join(arguments).encode(), int(work), int(region)))

    def launch(self, body: bytes) -> int:
        return int(self._quick.kcap_launch(body))

    def ignore_begin(self) -> None:
        self._quick.kcap_ignore(1)

    def ignore_end(self) -> None:
        self._quick.kcap_ignore(-1)

    def replace_begin(self) -> None:
        self._quick.kcap_replace(1)

    def replace_end(self) -> None:
        self._quick.kcap_replace(-1)

    def graph_begin(self, nodes: bool, stream: int = 0) -> None:
        self._quick.kcap_graph_begin(int(nodes), stream)

    def graph_nodes(self) -> int:
        return int(self._quick.kcap_graph_nodes())

    def graph_end(self, info: bytes, nodes: int) -> int:
        return int(self._quick.kcap_graph_end(info, nodes))

    def graph_abandon(self) -> None:
        self._quick.kcap_graph_abandon()

    def graph_launched(self) -> None:
        self._quick.kcap_graph_launched()

    def graph_memory(self, ranges: Ranges | None) -> None:
        bounds = [bound for pair in ranges or () for bound in pair]
        array = None if ranges is None else (ctypes.c_uint64 * len(bounds))(*bounds)
        self._quick.kcap_graph_memory(array, len(bounds) // 2)

    def group(self, name: str, handle: int, size: int, rank: int, label: str = "") -> None:
        self._quick.kcap_group(name.encode(), handle, size, rank, label.encode())

    def line(self, text: bytes) -> None:
        self._lib.kcap_line(text)

    def close(self) -> None:
        self._lib.kcap_close()

    def forget(self) -> None:
        """Nothing: the library does it."""


def _declare(lib: ctypes.PyDLL) -> None:
    number, text, small = ctypes.c_int64, ctypes.c_char_p, ctypes.c_int
    for name in ("step_program", "operator", "launch", "text", "graph_nodes", "graph_end"):
        getattr(lib, f"kcap_{name}").restype = number
    lib.kcap_error.restype = text
    lib.kcap_launch.argtypes = [text]
    lib.kcap_text.argtypes = [text]
    lib.kcap_operator.argtypes = [text, text, small, small]
    lib.kcap_python_function.argtypes = [text, ctypes.py_object]
    lib.kcap_python_function.restype = ctypes.py_object
    lib.kcap_graph_begin.argtypes = [small, ctypes.c_void_p]
    lib.kcap_graph_end.argtypes = [text, number]
    lib.kcap_graph_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    lib.kcap_group.argtypes = [text, number, small, small, text]


# Kind in native/external.h.
NONE, INTEGER, REAL, BOOLEAN, TENSOR, TEXT, LIST = range(7)


MOST_TEXTS = 1 << 16


LONGEST_TEXT = LONGEST_LIST = 4096


MOST_VALUES = 1 << 16  # of one call, those in lists among them


DEEPEST = 24  # lists in lists


JSON_MARK = b"\x01"  # before what is JSON already, as in native/json.h


class Packer:
    """Packs values for the recorder. `number(text)` gives a text its number in it."""

    def __init__(self, number: Callable[[bytes], int]) -> None:
        self._number = number
        self._texts: dict[bytes, int] = {}

    def __call__(self, values: Sequence[Any]) -> tuple[bytes, bytes]:
        """A byte for each value, lists' among them, and a word."""
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
            items = tuple(value)  # which does not change while they are read
            kinds.append(LIST)
            words.append(len(items))
            for item in items:
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

"""Loads the native recorder, which is built at its first use."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kcap.capture import native_build
from kcap.capture.recorder import Ranges
from kcap.capture.samples import RANGE_ARGUMENTS, VALUE_ARGUMENTS
from kcap.capture.taps.packing import Packer

SOURCE = Path(__file__).with_name("dispatcher.cpp")


def build() -> Path:
    """The compiled recorder; Unavailable if it cannot be had."""
    return native_build.build([SOURCE, *sorted(SOURCE.parent.glob("native/*.h"))])


class NativeRecorder:
    """The native recorder of this process (there is one). What may write to disk releases the GIL."""

    kind = "RecordFunction"
    sees_graphs = True

    def __init__(self, stem: Path, keep_tokens: bool = False, fail_after: int = -1) -> None:
        path = str(build())
        self._lib, self._quick = ctypes.CDLL(path), ctypes.PyDLL(path)
        self._lib.kcap_error.restype = ctypes.c_char_p
        self._lib.kcap_step_end.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p]
        self._lib.kcap_fail_after.argtypes = [ctypes.c_int64]
        _declare(self._quick)
        self._pack = Packer(lambda text: int(self._quick.kcap_text(text)))
        names = [" ".join(sorted(group)).encode() for group in (VALUE_ARGUMENTS, RANGE_ARGUMENTS)]
        if self._lib.kcap_open(str(stem).encode(), *names, int(keep_tokens)):
            reason = self.error
            if reason:
                self._lib.kcap_close()
            raise RuntimeError(reason or "this process records already")
        self._lib.kcap_fail_after(fail_after)

    @property
    def error(self) -> str:
        """Why it stopped by itself; empty while it is well."""
        return (self._lib.kcap_error() or b"").decode(errors="replace")

    def start(self, loose: bool) -> None:
        self._lib.kcap_start(int(loose))

    def stop(self) -> None:
        self._lib.kcap_stop()

    def step_begin(self, phase: int, sampled: bool = True) -> None:
        self._quick.kcap_step_begin(phase, int(sampled))

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

    def call(self, operator: int, launch: int, values: Sequence[Any], enter: bool, detail: bool) -> bool:
        return bool(self._quick.kcap_call(operator, launch, len(values), *self._pack(values), enter, detail))

    def leave(self) -> None:
        self._quick.kcap_leave()

    def graph_begin(self, nodes: bool) -> None:
        self._quick.kcap_graph_begin(int(nodes))

    def graph_nodes(self) -> int:
        return int(self._quick.kcap_graph_nodes())

    def graph_end(self, info: bytes, nodes: int) -> int:
        return int(self._quick.kcap_graph_end(info, nodes))

    def graph_abandon(self) -> None:
        self._quick.kcap_graph_abandon()

    def graph_replay(self, graph: int) -> None:
        self._quick.kcap_graph_replay(graph)

    def private_memory(self, ranges: Ranges) -> None:
        bounds = [bound for pair in ranges for bound in pair]
        self._quick.kcap_private_memory((ctypes.c_uint64 * len(bounds))(*bounds), len(ranges))

    def group(self, name: str, handle: int, size: int, rank: int, label: str = "") -> None:
        self._quick.kcap_group(name.encode(), handle, size, rank, label.encode())

    def line(self, text: bytes) -> None:
        self._lib.kcap_line(text)

    def close(self) -> None:
        self._lib.kcap_close()


def _declare(lib: ctypes.PyDLL) -> None:
    number, text, small = ctypes.c_int64, ctypes.c_char_p, ctypes.c_int
    for name in ("step_program", "operator", "launch", "text", "graph_nodes", "graph_end"):
        getattr(lib, f"kcap_{name}").restype = number
    lib.kcap_launch.argtypes = [text]
    lib.kcap_text.argtypes = [text]
    lib.kcap_operator.argtypes = [text, text, small, small]
    lib.kcap_call.argtypes = [number, number, small, text, ctypes.c_void_p, small, small]
    lib.kcap_graph_end.argtypes = [text, number]
    lib.kcap_graph_replay.argtypes = [number]
    lib.kcap_private_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    lib.kcap_group.argtypes = [text, number, small, small, text]

"""Messages to a candidate's driver, what it reports of one, and where its outputs are.

The Python side of native/message.h and native/workload.h; GATE's is in native/cuda.h.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kcap.schemas.results.measurement import Method

OPEN, PREPARE, RUN = 1, 2, 3
TENSOR, INTEGER, REAL, BOOLEAN, NOTHING = range(5)
FINE, RAISED, NO_TENSOR, COUNT, SHAPE, DTYPE, DEVICE, INPUT, DRIVER, NO_GRAPH, RESERVED = range(11)
UNREPORTED = 0xFFFFFFFF  # what the judge leaves in a report's place
DESTINATION, GRAPHS = 1, 2  # flags of a Workload
METHODS: tuple[Method, ...] = ("host", "graph")
ADDRESS = struct.Struct("<Q")
PIECE = struct.Struct("<QQ")  # of a GPU's memory, with its descriptor: its address and its bytes, 0 when it is gone
GATE = 512  # bytes of the arena for each of the two words of a gate on a GPU, behind the sets
REPORT_BYTES = 1 << 16
MOST_TEXT = 4000  # bytes of it
REPORT = struct.Struct("<IIII")  # code, iteration, method, bytes of the text that follows


@dataclass(frozen=True)
class Content:
    """An input: a tensor, or its scalar."""

    kind: int
    value: int | float = 0
    name: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def pack(self) -> bytes:
        integer = int(self.value) if self.kind in (INTEGER, BOOLEAN) else 0
        head = struct.pack("<Iqd", self.kind, integer, float(self.value) if self.kind == REAL else 0.0)
        return head + (_pack_tensor(self.name, self.dtype, self.shape) if self.kind == TENSOR else b"")


@dataclass(frozen=True)
class Result:
    """One output."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def pack(self) -> bytes:
        return _pack_tensor(self.name, dtype_name(self.dtype), self.shape)

    @property
    def bytes(self) -> int:
        """Of its elements in its own dtype."""
        return int(self.dtype.itemsize * torch.Size(self.shape).numel())


def open_message(
    contents: Sequence[Content], results: Sequence[Result], sets: int, flags: int, stride: int, places: Sequence[int]
) -> bytes:
    """A Workload, as the driver reads it. `stride`: bytes from one set of inputs to the next; `places`: in a set, of
    inputs, and of outputs in destination passing style.
    """
    head = struct.pack("<IIIQ", OPEN, flags, sets, stride)
    inputs = [struct.pack("<I", len(contents)), *(content.pack() for content in contents)]
    outputs = [struct.pack("<I", len(results)), *(result.pack() for result in results)]
    return b"".join([head, *inputs, *outputs, struct.pack(f"<I{len(places)}Q", len(places), *places)])


def prepare_message(count: int, upcast: int, gate: int = 0) -> bytes:
    """What can be done for a run before its inputs are there. On a GPU, where it can be a graph, that is launched, and
    waits for a word in the arena to be no less than `gate`; before it an empty kernel waits for `gate - 1`. The report
    has its method then.
    """
    return struct.pack("<IIII", PREPARE, count, upcast, gate)


def run_message(count: int, upcast: int) -> bytes:
    """`count` invocations, or what is left of them where they are launched already."""
    return struct.pack("<IIII", RUN, count, upcast, 0)


@dataclass(frozen=True)
class Report:
    """What a driver says came of a message: nothing that counts for a Solution, as its code can write it, too."""

    code: int
    iteration: int = 0
    method: int = 0
    text: str = ""


def read_report(memory: bytes) -> Report:
    """The report in a candidate's `memory`."""
    code, iteration, method, length = REPORT.unpack_from(memory)
    text = memory[REPORT.size : REPORT.size + min(length, MOST_TEXT)]
    return Report(code, iteration, method, text.decode(errors="replace"))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def scalar_content(value: Any) -> Content:
    """What is given as a Python scalar, or left out (None)."""
    match value:
        case None:
            return Content(NOTHING)
        case bool():
            return Content(BOOLEAN, value)
        case int():
            return Content(INTEGER, value)
    return Content(REAL, float(value))


def _pack_tensor(name: str, dtype: str, shape: Sequence[int]) -> bytes:
    return _pack_text(name) + _pack_text(dtype) + struct.pack(f"<I{len(shape)}q", len(shape), *shape)


def _pack_text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<I", len(content)) + content

"""Messages to a candidate's driver, what it reports of one, and where its outputs are.

The Python side of native/message.h and native/workload.h.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kcap.schemas.results.measurement import Method

OPEN, PREPARE, RUN, DELIVER = 1, 2, 3, 4
POOLED, FIXED, INTEGER, REAL, BOOLEAN, NOTHING = range(6)
FINE, RAISED, NO_TENSOR, COUNT, SHAPE, DTYPE, DEVICE, INPUT, DRIVER, NO_GRAPH, RESERVED = range(11)
UNREPORTED = 0xFFFFFFFF  # what the judge leaves in a report's place
DESTINATION, GRAPHS = 1, 2  # flags of a Workload
METHODS: tuple[Method, ...] = ("host", "graph")
ADDRESS = struct.Struct("<Q")
REPORT_BYTES = 1 << 16
MOST_TEXT = 4000  # bytes of it
REPORT = struct.Struct("<IIII")  # code, iteration, method, bytes of the text that follows


@dataclass(frozen=True)
class Content:
    """Where the content of an input lies in the pool, or its scalar.

    `slack`: elements that a POOLED one's content has beyond its own; `stride`: bytes between a FIXED one's variants.
    `written`: it need not be what it was.
    """

    kind: int
    value: int | float = 0
    name: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    offset: int = 0
    slack: int = 0
    stride: int = 0
    written: bool = False

    def pack(self) -> bytes:
        integer = int(self.value) if self.kind in (INTEGER, BOOLEAN) else 0
        head = struct.pack("<Iqd", self.kind, integer, float(self.value) if self.kind == REAL else 0.0)
        if self.kind not in (POOLED, FIXED):
            return head
        return (
            head
            + _pack_tensor(self.name, self.dtype, self.shape)
            + struct.pack("<QQQI", self.offset, self.slack, self.stride, self.written)
        )


@dataclass(frozen=True)
class Result:
    """One output in a slot; `reserved`: bytes of it there, enough for float64."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    reserved: int

    def pack(self) -> bytes:
        return _pack_tensor(self.name, dtype_name(self.dtype), self.shape) + struct.pack("<Q", self.offset)

    @property
    def bytes(self) -> int:
        """Of its elements in its own dtype."""
        return int(self.dtype.itemsize * torch.Size(self.shape).numel())


def open_message(
    contents: Sequence[Content],
    results: Sequence[Result],
    pool: int,
    slot: int,
    variants: int,
    sets: int,
    flags: int,
    stride: int,
    places: Sequence[int],
) -> bytes:
    """A Workload, as the driver reads it. `pool`: bytes of it; `slot`: of the outputs of one invocation, on a GPU;
    `stride`: from one set of inputs to the next; `places` in it: of inputs, and of outputs in destination passing
    style.
    """
    head = struct.pack("<IIII", OPEN, flags, variants, sets) + struct.pack("<QQQ", pool, slot, stride)
    inputs = [struct.pack("<I", len(contents)), *(content.pack() for content in contents)]
    outputs = [struct.pack("<I", len(results)), *(result.pack() for result in results)]
    return b"".join([head, *inputs, *outputs, struct.pack(f"<I{len(places)}Q", len(places), *places)])


def prepare_message(first: int, count: int, upcast: int, seed: int) -> bytes:
    """What can be done for a run before its inputs are there. `seed` on a GPU alone, where the driver fills them."""
    return struct.pack("<IIIIQ", PREPARE, first, count, upcast, seed)


def run_message(first: int, count: int, upcast: int, seed: int = 0) -> bytes:
    """`count` invocations, from number `first` on."""
    return struct.pack("<IIIIQ", RUN, first, count, upcast, seed)


def deliver_message(numbers: Sequence[int]) -> bytes:
    """On a GPU: the outputs of some invocations of the last run, each in the slot of its number, from 0."""
    return struct.pack(f"<II{len(numbers)}I", DELIVER, len(numbers), *numbers)


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

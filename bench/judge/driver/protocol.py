"""Messages to a candidate's driver and its answers, and the memory in which it leaves outputs and times for the judge.

The Python side of native/message.h and native/workload.h.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from kcap.schemas.results.measurement import Method

OPEN, RUN, CHECK, DELIVER, EMPTY = 1, 2, 3, 4, 5
POOLED, FIXED, INTEGER, REAL, BOOLEAN, NOTHING = range(6)
FINE, RAISED, NO_TENSOR, SUBCLASS, ATTRIBUTE, COUNT, SHAPE, DTYPE, DEVICE, INPUT, DRIVER, PATCHED, NO_GRAPH = range(13)
RESERVED = 13
DESTINATION, GRAPHS, HANDED = 1, 2, 4  # flags of a Workload
METHODS: tuple[Method, ...] = ("host", "graph", "events")
LONGEST = 1 << 20
NONCE = 8  # bytes before each message, and before its answer
ANSWER = struct.Struct(f"<{NONCE}sIIIQQQ")


@dataclass(frozen=True)
class Content:
    """Where the content of an input lies in the pool, or its scalar.

    `slack`: elements that a POOLED one's content has beyond its own; `stride`: bytes between a FIXED one's variants.
    """

    kind: int
    value: int | float = 0
    name: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    offset: int = 0
    slack: int = 0
    stride: int = 0

    def pack(self) -> bytes:
        integer = int(self.value) if self.kind in (INTEGER, BOOLEAN) else 0
        head = struct.pack("<Iqd", self.kind, integer, float(self.value) if self.kind == REAL else 0.0)
        if self.kind not in (POOLED, FIXED):
            return head
        return (
            head
            + _pack_tensor(self.name, self.dtype, self.shape)
            + struct.pack("<QQQ", self.offset, self.slack, self.stride)
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


@dataclass(frozen=True)
class Layout:
    """The shared memory of one Workload: outputs of `slots` invocations, then the times of `most`."""

    slot: int
    slots: int
    most: int

    @property
    def times(self) -> int:
        return self.slot * self.slots

    @property
    def total(self) -> int:
        return self.times + 16 * self.most


def open_message(
    contents: Sequence[Content],
    results: Sequence[Result],
    layout: Layout,
    pool: int,
    variants: int,
    sets: int,
    flags: int,
    threads: int,
) -> bytes:
    """A Workload, as the driver reads it; `pool`: bytes of it; `threads`: that the candidate was given."""
    head = struct.pack("<IIIII", OPEN, flags, variants, sets, threads)
    sizes = struct.pack("<QQQQQQ", pool, layout.total, layout.slot, layout.slots, layout.times, layout.most)
    inputs = [struct.pack("<I", len(contents)), *(content.pack() for content in contents)]
    outputs = [struct.pack("<I", len(results)), *(result.pack() for result in results)]
    return b"".join([head, sizes, *inputs, *outputs])


def run_message(first: int, count: int, seed: int, upcast: int = 0, empty: bool = False) -> bytes:
    """`count` invocations, from number `first` of `seed` on; `empty`: but for the calls."""
    return struct.pack("<IIIIQ", EMPTY if empty else RUN, first, count, upcast, seed)


def deliver_message(numbers: Sequence[int]) -> bytes:
    """The outputs of some invocations of the last run, each in the slot of its number, from 0; their inputs' check."""
    return struct.pack(f"<II{len(numbers)}I", DELIVER, len(numbers), *numbers)


def check_message() -> bytes:
    return struct.pack("<I", CHECK)


@dataclass(frozen=True)
class Answer:
    """What a driver says; nanoseconds.

    `wall_ns` is the judge's own clock around the request; `processors`: how many its sandbox used meanwhile.
    """

    code: int
    iteration: int
    method: int
    elapsed_ns: int
    stray_ns: int
    outside_ns: int
    text: str
    wall_ns: int
    processors: float = 0.0


def read_answer(content: bytes, nonce: bytes, wall_ns: int, processors: float = 0.0) -> Answer:
    """The answer in `content` to the message of `nonce`; ValueError if it is none."""
    if len(content) < ANSWER.size or content[:NONCE] != nonce:
        raise ValueError("an answer that is none")
    text = content[ANSWER.size :].decode(errors="replace")
    _, code, iteration, method, elapsed, stray, outside = ANSWER.unpack_from(content)
    return Answer(code, iteration, method, elapsed, stray, outside, text, wall_ns, processors)


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


OUTPUT_PIECES, LEAST_PIECE = 16, 1 << 14  # of one output, and the bytes of the smallest
Bytes = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]


@dataclass
class OutputMemory:
    """The memory of an open Workload that a candidate writes to. `outputs`: copies, by the invocation's number;
    `pieces`: what is still to be copied, from where in the memory to where.
    """

    descriptor: int
    layout: Layout
    view: mmap.mmap
    outputs: dict[int, list[torch.Tensor]] = field(default_factory=dict, repr=False)
    pieces: list[tuple[int, Bytes]] = field(default_factory=list, repr=False)

    @classmethod
    def allocate(cls, layout: Layout) -> OutputMemory:
        descriptor = os.memfd_create("outputs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, layout.total)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(descriptor, layout, mmap.mmap(descriptor, layout.total, prot=mmap.PROT_READ))
        except BaseException:
            os.close(descriptor)
            raise

    def times_ns(self, count: int) -> list[int]:
        """Of each of the last `count` invocations, by the driver's clock."""
        at = self.layout.times
        pairs = numpy.frombuffer(self.view[at : at + 16 * count], dtype=numpy.uint64).reshape(-1, 2)
        return [int(end) - int(start) for start, end in pairs]

    def prepare(self, numbers: Sequence[int], results: Sequence[Result], upcast: bool) -> None:
        """For `take`: room for these invocations' `results`; `upcast`: floating ones are in float64."""
        self.outputs, self.pieces = {number: [] for number in numbers}, []
        for number, outputs in self.outputs.items():
            for result in results:
                dtype = torch.float64 if upcast and result.dtype.is_floating_point else result.dtype
                room = torch.empty(torch.Size(result.shape).numel() * dtype.itemsize, dtype=torch.uint8)
                outputs.append(room.view(dtype).view(result.shape))
                self._cut(number * self.layout.slot + result.offset, room.numpy())
        secrets.SystemRandom().shuffle(self.pieces)

    def take(self) -> None:
        """Copy what is prepared, a piece here and a piece there: whoever still writes cannot keep ahead of it."""
        memory = numpy.frombuffer(self.view, dtype=numpy.uint8)
        for at, piece in self.pieces:
            piece[:] = memory[at : at + piece.size]
        self.pieces = []

    def _cut(self, begin: int, room: Bytes) -> None:
        step = max(-(-room.size // OUTPUT_PIECES), LEAST_PIECE)
        self.pieces += [(begin + at, room[at : at + step]) for at in range(0, room.size, step)]

    def close(self) -> None:
        self.view.close()
        os.close(self.descriptor)

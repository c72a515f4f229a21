"""The memory in which a candidate leaves outputs and times for the judge."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from kcap.bench.judge.wire import Layout, Result

PIECES, LEAST = 16, 1 << 14  # of one output, and the bytes of the smallest
Bytes = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]


@dataclass
class Shared:
    """The memory of an open Workload that a candidate writes to. `outputs`: copies, by the invocation's number;
    `pieces`: what is still to be copied, from where in the memory to where.
    """

    descriptor: int
    layout: Layout
    view: mmap.mmap
    outputs: dict[int, list[torch.Tensor]] = field(default_factory=dict, repr=False)
    pieces: list[tuple[int, Bytes]] = field(default_factory=list, repr=False)

    @classmethod
    def made(cls, layout: Layout) -> Shared:
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
        step = max(-(-room.size // PIECES), LEAST)
        self.pieces += [(begin + at, room[at : at + step]) for at in range(0, room.size, step)]

    def close(self) -> None:
        self.view.close()
        os.close(self.descriptor)

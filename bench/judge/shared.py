"""The memory in which a candidate leaves outputs and times for the judge."""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass

import numpy
import torch

from kcap.bench.judge.wire import Layout, Result


@dataclass
class Shared:
    """The memory of an open Workload that a candidate writes to."""

    descriptor: int
    layout: Layout
    view: mmap.mmap

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

    def output(self, number: int, result: Result, upcast: bool) -> torch.Tensor:
        """A copy of one output of invocation `number`; `upcast`: a floating one is in float64."""
        dtype = torch.float64 if upcast and result.dtype.is_floating_point else result.dtype
        size = torch.Size(result.shape).numel() * dtype.itemsize
        at = number * self.layout.slot + result.offset
        content = bytearray(self.view[at : at + size])
        flat = torch.frombuffer(content, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
        return flat.view(dtype).view(result.shape)

    def close(self) -> None:
        self.view.close()
        os.close(self.descriptor)

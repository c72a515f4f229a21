"""Large inputs on the CPU: the judge makes them, and hands them to a candidate as a batch begins.

They lie in memory that is new for each batch, and that no other process has before the judge's clock runs. So nothing
can be computed ahead, and the time that filling takes is in no clock: between invocations a candidate's process only
copies outputs. What it is told, and what it has then, is driver/native/handed.h's.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass, field

from kcap.bench.integrity.driver import Filler
from kcap.bench.judge.draws import Draws
from kcap.errors import KcapError

LEAST = 1 << 20  # bytes of inputs: smaller ones a candidate's driver fills, which leaves them in the core's own caches
BATCH_BYTES = 256 << 20
FEWEST, MOST = 3, 64  # invocations in a batch, for each of which there is a set of inputs
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def handed(drawn: Draws) -> bool:
    """Whether its inputs are handed over."""
    return drawn.given >= LEAST


def sets(drawn: Draws) -> int:
    """Of inputs, in one batch."""
    return max(min(BATCH_BYTES // max(drawn.given, 1), MOST), FEWEST)


@dataclass
class Handed:
    """The inputs of one candidate's batches; those of the last are kept, to be compared."""

    filler: Filler
    inputs: int
    descriptor: int | None = None
    view: mmap.mmap | None = field(default=None, repr=False)

    @classmethod
    def made(cls, opening: bytes, drawn: Draws) -> Handed:
        """`opening`: what the candidate is told of the Workload. KcapError where there is no memory for it."""
        try:
            return cls(Filler(opening, drawn.pool), len(drawn.contents))
        except RuntimeError as error:
            raise KcapError(str(error)) from None

    def fill(self, seed: int, first: int, count: int) -> tuple[bytes, int]:
        """Inputs of `count` invocations of `seed`, from number `first` on: what to say of them, and their memory."""
        self._release()
        most = self.filler.most
        self.descriptor = os.memfd_create("batch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, most)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        self.view = mmap.mmap(self.descriptor, most)
        places = array.array("Q", bytes(8 * count * self.inputs))
        size = self.filler.fill(self.view, seed, first, count, places)
        return struct.pack("<Q", size) + places.tobytes(), self.descriptor

    def changed(self, numbers: list[int]) -> int | None:
        """The first input that is not what it was in one of these invocations of the last batch, by its place."""
        found = (self.filler.changed(number) for number in numbers)
        return next((place for place in found if place is not None), None)

    def close(self) -> None:
        self._release()
        self.filler.close()

    def _release(self) -> None:
        """Give the memory back, whoever else still has it."""
        if self.view is not None:
            with contextlib.suppress(OSError):
                self.view.madvise(mmap.MADV_REMOVE)
            self.view.close()
        if self.descriptor is not None:
            os.close(self.descriptor)
        self.descriptor = self.view = None

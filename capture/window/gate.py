"""Which steps of an engine process count: numbers in a file that `kcap window` shares.

The process numbers its steps from 1 as they begin. A step counts if its number is FROM or more when it begins, and
below UNTIL when it has ended: what began before the window was opened, or ended after it was closed, does not count.
Ranks of one replica run the same steps, so that the same numbers give them the same window.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

MAGIC = 0x3145544147504B
EVER = (1 << 63) - 1
PATIENCE = 0.05  # seconds that a step waits at most for a window that is being set
READY, BEGUN, ENDED, FROM, UNTIL, HELD, ASKED, ANSWERED, REPLICA = range(9)
CELLS = 16


def open_cells(path: Path, create: bool = False) -> memoryview:
    """The numbers in `path`; ValueError if it is none, or not ready yet."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
    file = os.open(path, flags, 0o600)
    try:
        if create:
            os.posix_fallocate(file, 0, 8 * CELLS)  # real blocks: a full disk is an error here, and no crash later
        if os.fstat(file).st_size < 8 * CELLS:
            raise ValueError(f"{path}: no gate")
        cells = memoryview(mmap.mmap(file, 8 * CELLS)).cast("Q")
    finally:
        os.close(file)
    if not create and cells[READY] != MAGIC:
        raise ValueError(f"{path}: no gate yet")
    return cells


class Gate:
    """The gate of this process. Its numbers may change at any moment; a step is asked about when it begins and ends."""

    def __init__(self, path: Path, replica: int) -> None:
        self._path = path
        self._cells = open_cells(path, create=True)
        self._cells[FROM], self._cells[UNTIL], self._cells[REPLICA] = EVER, EVER, replica
        self._cells[READY] = MAGIC

    def open(self, first: int) -> None:
        """Count from step `first` on, unless another process has said since from which."""
        if self._cells[FROM] == EVER:
            self._cells[FROM] = first

    @property
    def first(self) -> int:
        """The first step of the window, or of the last."""
        return self._cells[FROM]

    def begin(self) -> bool:
        """One more step begins; whether it counts so far."""
        self._cells[BEGUN] += 1  # before the gate is looked at, as who sets it looks afterwards
        return self._admits(self._cells[BEGUN])

    def end(self) -> bool:
        """The step that began last is over; whether it counts."""
        number = self._cells[ENDED] = self._cells[BEGUN]
        return self._admits(number)

    def admits_next(self) -> bool:
        """Whether a step that began now would count."""
        return self._admits(self._cells[BEGUN] + 1)

    def _admits(self, number: int) -> bool:
        if self._cells[HELD]:
            self._wait()
        return self._cells[FROM] <= number < self._cells[UNTIL]

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while self._cells[HELD]:
            if time.monotonic() > deadline:  # who held it is gone
                self._cells[HELD] = 0
            time.sleep(0.0001)

    @property
    def asked(self) -> int:
        """How often the gate was set."""
        return self._cells[ASKED]

    def answer(self, asked: int) -> None:
        """Tell that this process goes by what was set then."""
        self._cells[ANSWERED] = asked

    def remove(self) -> None:
        """The window is over for good. Threads that still look at the numbers may."""
        self._path.unlink(missing_ok=True)

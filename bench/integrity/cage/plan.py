"""What a cage is asked to be, and what its processes share while they set it up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kcap.bench.integrity.cage.pieces import Pieces


@dataclass(frozen=True)
class Cage:
    """Limits of one candidate; sizes in bytes."""

    folder: Path  # its scratch: its working directory, and the only place it may write
    memory: int | None  # private memory over what the process starts with; None where CUDA reserves address space
    disk: int  # what it may write, in the scratch and to shared memory each
    processes: int  # threads and processes at most
    hidden: tuple[Path, ...] = ()  # files and folders whose content it must not see
    keep: tuple[int, ...] = ()  # descriptors that stay open: every other above 2 is closed
    printed: int = 1 << 20  # how much of its stdout and stderr reaches the log


@dataclass(frozen=True)
class Plan:
    """One cage in the making. `told` and `ended` are the writing ends of pipes to the process that asked for it."""

    cage: Cage
    body: Callable[[], None]
    log: int
    pieces: Pieces
    told: int
    ended: int
    asker: int  # process that asked
    spaces: tuple[int, int] | None  # user and mount namespace of an earlier cage, whose scratch goes on
    inherited: tuple[str, ...]  # pieces that come with those

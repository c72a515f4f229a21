"""A shard's counters, in a mapping that the engine's process shares: their layout, and how far a session is by them."""

from __future__ import annotations

import mmap
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from kcap.capture.session import PROGRAM, Session

KERNELS = "kernels"  # the sources of kernels, in the session's directory
LAYER_NAMES = ("layer_name", "layer_id")  # by which an engine's operator looks up what it runs


# The layout of native/shard.h.
MAGIC = 0x31304341504B0A
MAX_BATCHES, MAX_CALLS, PHASE_COUNT, HEADER = 1 << 16, 1 << 17, 4, 64
CLOSED, FAILED, STEPS, OVERFLOW, TRACED, OFF_STEP, SAMPLES_SKIPPED, LOOSE_STEPS = 1, 2, 3, 4, 5, 6, 7, 16
BYTES = 8 * (HEADER + MAX_BATCHES + MAX_CALLS * PHASE_COUNT)

# The bounds of native/state.h.
MAX_EXACT = 256  # calls of one operator; further ones are rounded
MAX_KEYS = 1 << 18  # signatures whose call is remembered


class Counts:
    """The shared mapping of counters, read (or, by the Python recorder, written) in place."""

    def __init__(self, path: Path, create: bool = False) -> None:
        if create:
            with path.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, BYTES)
        access = mmap.ACCESS_WRITE if create else mmap.ACCESS_READ
        with path.open("r+b" if create else "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=access)
        if len(mapped) < BYTES:
            raise ValueError("not a counts file")
        self.cells = memoryview(mapped)[:BYTES].cast("Q")
        if create:
            self.cells[0] = MAGIC
        elif self.cells[0] != MAGIC:
            raise ValueError("not a counts file")

    @staticmethod
    def batch(index: int) -> int:
        return HEADER + index

    @staticmethod
    def loose(call: int, phase: int) -> int:
        return HEADER + MAX_BATCHES + call * PHASE_COUNT + phase


def steps_so_far(directory: Path) -> tuple[int, int]:
    """(processes that record, steps ended so far) by the counters alone: cheap enough to ask twice a second."""
    steps = [cells[STEPS] for _, cells in _counted(directory)]
    return len(steps), max(steps, default=0)


def all_closed(directory: Path, is_gone: Callable[[Path], bool] = lambda path: False) -> bool:
    """Whether every process that opened a shard has closed it. `is_gone`: of a file of it, that it never will."""
    return all(is_gone(path) for path in _open_shards(directory))


def lost_processes(directory: Path) -> set[int]:
    """Those of this machine that have ended and did not close their shard."""
    return {shard_process(path)[1] for path in _open_shards(directory) if has_ended(path)}


def _open_shards(directory: Path) -> Iterator[Path]:
    """The counters of each process that has not closed its shard."""
    for path, cells in _counted(directory):
        if not (cells[CLOSED] or cells[FAILED] or _is_replaced(path)):
            yield path


def _counted(directory: Path) -> Iterator[tuple[Path, memoryview]]:
    """The counters of each process that can be read: where, and their cells."""
    for path in directory.glob("*.counts"):
        with suppress(OSError, ValueError):
            yield path, Counts(path).cells


def window_over(directory: Path) -> bool:
    """Whether processes have recorded, and all of them have closed their shards."""
    return steps_so_far(directory)[0] > 0 and all_closed(directory)


def _is_replaced(path: Path) -> bool:
    """Whether the process runs another program since: the one whose shard `path` is of ended by `exec`."""
    process, _, number = path.stem.partition(PROGRAM)
    return path.with_name(f"{process}{PROGRAM}{int(number or 1) + 1}{path.suffix}").exists()


SHARD_NAME = re.compile(r"(.+)-(\d+)(?:-\D\w*)?")  # a host, its process, and perhaps a part


def has_ended(path: Path) -> bool:
    """Whether the process that a file of a shard is of was one of this machine, and has ended."""
    host, process = shard_process(path)
    return host == socket.gethostname() and not is_alive(process)


def shard_process(path: Path) -> tuple[str, int]:
    match = SHARD_NAME.fullmatch(path.stem)
    assert match is not None, path  # by Session.shard
    return match[1], int(match[2])


def is_alive(process: int) -> bool:
    """Whether it runs; one that has ended and that nobody asked for its status (as in many containers) does not."""
    try:
        os.kill(process, 0)
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:
        return True
    return stat[0] != "Z" or int(stat[17]) > 1  # its first thread may end before the others


CLOSE_PATIENCE = 10.0  # seconds


def close_shards(session: Session) -> None:
    """Ask every process to close its shard; returns when those that live have, or after CLOSE_PATIENCE."""
    session.stop_file.touch(mode=0o600)
    deadline = time.monotonic() + CLOSE_PATIENCE
    while not all_closed(Path(session.directory), has_ended) and time.monotonic() < deadline:
        time.sleep(0.05)

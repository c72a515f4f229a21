"""The cage: a process in which foreign code runs, and that costs nobody but itself.

What the machine has is used, what it lacks is left out and said so (`Caged.confined`, `Caged.refused`, `kinds`):
namespaces(7) for processes, mounts, network and IPC; a scratch of fixed size; landlock(7); seccomp(2); where root
judges, a user of its own; no capabilities(7); setrlimit(2); prctl(2), by which nothing survives its keeper.

Inside, CUDA needs these, and none is refused: ioctl and mmap on /dev/nvidia*, reading /proc/driver/nvidia and /sys,
address space without a limit (`memory=None`), writing to /dev/shm, abstract Unix sockets, setting its own affinity,
memory policies, naming its threads by /proc/self/task/*/comm (where that fails cuInit gives 304; for what user 0 is
refused see own_proc). Device files must exist before (the first use of CUDA as root makes them), and CUDA's handles for
sharing memory between processes do not pass from one cage to another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import kcap
from kcap.bench.integrity.cage import calls, keeper, mounts
from kcap.bench.integrity.cage.caged import Caged, Ended
from kcap.bench.integrity.cage.kinds import HOLDS, kinds
from kcap.bench.integrity.cage.pieces import Pieces
from kcap.bench.integrity.cage.plan import Cage, Plan
from kcap.errors import CallError, KcapError

__all__ = ["HOLDS", "Cage", "Caged", "Ended", "guard", "kinds", "open_cage"]


def open_cage(
    cage: Cage,
    log: int,
    body: Callable[[], None],
    without: frozenset[str] = frozenset(),
    after: Caged | None = None,
) -> Caged:
    """Fork, confine the child, and run `body` in it as a program whose stdout and stderr go to descriptor `log`.

    Must be called by the only thread of a process that keeps no secret in memory, as the child has a copy. `without`
    names pieces to leave out. `after` is a cage that was ended with `keep_scratch`: the new one goes on in its scratch,
    with the same hidden folders.
    The caller becomes the parent of orphans (prctl(2), PR_SET_CHILD_SUBREAPER). KcapError if the child cannot be made.
    """
    _check(cage)
    spaces = after.spaces if after is not None else None
    inherited = tuple(name for name in mounts.LAID if after is not None and name in after.confined)
    told, tell, ended, end = _pipes()
    calls.prctl(calls.PR_SET_CHILD_SUBREAPER, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    asker = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        for descriptor in (told, tell, ended, end):
            os.close(descriptor)
        raise KcapError(f"a Solution's process cannot be forked: {error.strerror}") from None
    if pid == 0:
        keeper.run(Plan(cage, body, log, Pieces(without), tell, end, asker, spaces, inherited))
    os.close(tell)
    os.close(end)
    return Caged(pid, told, ended)


def _pipes() -> tuple[int, int, int, int]:
    """Two, or none: OSError."""
    first = os.pipe()
    try:
        return *first, *os.pipe()
    except OSError:
        for descriptor in first:
            os.close(descriptor)
        raise


def guard() -> None:
    """Close this process's memory to others of its user: for whoever holds what a candidate must not see.

    It makes the process's /proc folder root's, and no core file is written. See PR_SET_DUMPABLE in prctl(2).
    """
    calls.prctl(calls.PR_SET_DUMPABLE, 0)


def _check(cage: Cage) -> None:
    """Refuse to hide what the candidate itself is made of, and scratch that is not there."""
    if not cage.folder.is_absolute() or not cage.folder.is_dir():
        raise KcapError(f"{cage.folder}: the scratch must be a folder that exists, given by its absolute path")
    for hidden in cage.hidden:
        for needed in (Path(sys.prefix), Path(sys.base_prefix), Path(kcap.__file__)):
            if needed.resolve().is_relative_to(hidden.resolve()):
                raise CallError(f"{hidden} holds {needed}, which Solutions need: pass a folder that holds no code")

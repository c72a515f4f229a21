"""The candidate's /proc: its processes may write to their own files, as CUDA does, and to nothing else. See proc(5).

User 0 owns the kernel's switches, so it is held closer: Landlock opens the candidate's own folder alone, and all of
/proc stays read-only where the network is the judge's, as /proc/self/net has that network's switches.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kcap.bench.integrity.cage import calls, namespaces
from kcap.bench.integrity.cage.pieces import Pieces

NAME = "own /proc"
_FLAGS = calls.MS_NOSUID | calls.MS_NODEV | calls.MS_NOEXEC


def lay(pieces: Pieces, user: int) -> None:
    """Mount it for a candidate that will be `user`, or open its own folder in the judge's, which is read-only."""
    if not pieces.holds(namespaces.MOUNTS):
        return
    writable = user != 0 or pieces.holds(namespaces.NETWORK)
    own = pieces.holds(namespaces.PIDS) and pieces.attempt(NAME, lambda: _mount(writable))
    if writable and not own:
        with contextlib.suppress(OSError):
            _bind("/proc/self", 0)


def folder(pieces: Pieces) -> Path:
    """Below which Landlock is to let this process write: the folders of its children too, or its own alone."""
    return Path("/proc" if pieces.holds(NAME) and os.geteuid() != 0 else "/proc/self")


def _mount(writable: bool) -> None:
    """A /proc of this pid namespace, in which no process outside has a folder.

    It is opened once all in it that is not the candidate's is read-only; where that fails it stays read-only.
    """
    calls.mount("proc", "/proc", "proc", _FLAGS | calls.MS_RDONLY)
    if writable:
        with contextlib.suppress(OSError):
            for path in _not_the_candidates():
                _bind(path, calls.MS_RDONLY)
            calls.mount(None, "/proc", None, calls.MS_REMOUNT | _FLAGS)


def _not_the_candidates() -> Iterator[str]:
    """The kernel's switches, and process 1, which keeps the candidate."""
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name == "1" or not (entry.name.isdigit() or entry.is_symlink()):
                yield entry.path


def _bind(path: str, access: int) -> None:
    """A mount of its own for `path`, with `access`."""
    calls.mount(path, path, None, calls.MS_BIND)
    calls.mount(None, path, None, calls.MS_REMOUNT | calls.MS_BIND | _FLAGS | access)

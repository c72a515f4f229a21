"""Ends all processes of a group, or of a tree. As a program: a group, once its input is closed, as it is when its
parent is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

PATIENCE, POLL = 10.0, 0.05  # seconds: until SIGKILL after SIGTERM, and as long after it; between two looks


def end_group(group: int, patience: float = PATIENCE) -> None:
    """SIGTERM all that is left of a group, and SIGKILL what has not ended after `patience` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + patience
        if not _lives(group):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
        while _lives(group) and time.monotonic() < deadline:
            time.sleep(POLL)


def descendants(root: int) -> set[tuple[int, str]]:
    """The processes that `root` started, and those that these did, in whichever session: each with its start time."""
    by_parent: dict[int, list[tuple[int, str]]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        if fields := _stat(int(name)):
            by_parent.setdefault(int(fields[1]), []).append((int(name), fields[19]))
    found, parents = set(), [root]
    while parents:
        children = by_parent.get(parents.pop(), [])
        found |= {*children}
        parents += [process for process, _ in children]
    return found


def kill(processes: set[tuple[int, str]]) -> None:
    """SIGKILL those of `descendants` that still run."""
    for process, started in processes:
        fields = _stat(process)
        if fields and fields[19] == started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return any(_is_of(group, int(process)) for process in os.listdir("/proc") if process.isdigit())


def _is_of(group: int, process: int) -> bool:
    """Whether it is of the group and runs. One that has ended stays in it until somebody asks for its status."""
    fields = _stat(process)
    if not fields:
        return False
    state, of, threads = fields[0], int(fields[2]), int(fields[17])
    return of == group and (state != "Z" or threads > 1)  # its first thread may end before the others


def _stat(process: int) -> list[str]:
    """What follows its name in /proc: state, parent, group …; nothing of one that has just ended."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []


if __name__ == "__main__":
    group = sys.stdin.buffer.read()
    if group:
        end_group(int(group))

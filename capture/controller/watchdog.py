"""Ends all processes of a group, or of a tree. As a program: a group, once its input is closed, as it is when its
parent is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

PATIENCE, POLL = 10.0, 0.05  # seconds: until SIGKILL after SIGTERM, and as long after it; between two looks
# Python's process that removes the shared memory of others when they have ended, and the seconds that it has for that.
TRACKER = b"resource_tracker import main"
TIDYING = 1.0

Process = tuple[int, str]  # its number, and the start time that tells it from a later one of that number


def end_group(group: int, patience: float = PATIENCE, others: frozenset[Process] = frozenset()) -> None:
    """SIGTERM all that is left of a group, and SIGKILL what has not ended after `patience` seconds, and `others`."""
    if _members(group):
        _signal_group(group, signal.SIGTERM)
        deadline = time.monotonic() + patience
        while _members(group) and time.monotonic() < deadline:
            time.sleep(POLL)
    kill_group(group, patience, others)


def kill_group(group: int, patience: float = PATIENCE, others: frozenset[Process] = frozenset()) -> None:
    """SIGKILL all of a group, and `others` that still run. Trackers come last: once the rest has ended, which takes
    `patience` seconds at most, they have time to remove what it left.
    """
    processes = _members(group) | others
    trackers = {process for process in processes if _is_tracker(process)}
    _kill(processes - trackers)
    _await_end(processes - trackers, patience)
    _await_end(trackers, TIDYING)
    _kill(trackers)
    _signal_group(group, signal.SIGKILL)  # what was forked meanwhile
    _await_end(_members(group), patience)


def _kill(processes: set[Process]) -> None:
    for process, _ in filter(_runs, processes):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _await_end(processes: set[Process], patience: float) -> None:
    deadline = time.monotonic() + patience
    while any(map(_runs, processes)) and time.monotonic() < deadline:
        time.sleep(POLL)


def descendants(root: int) -> frozenset[Process]:
    """The processes that `root` started, and those that these did, in whichever session."""
    by_parent: dict[int, list[Process]] = {}
    for process, fields in _running():
        by_parent.setdefault(int(fields[1]), []).append(process)
    found, parents = set[Process](), [root]
    while parents:
        children = by_parent.get(parents.pop(), [])
        found |= {*children}
        parents += [number for number, _ in children]
    return frozenset(found)


def _members(group: int) -> set[Process]:
    """The processes of a group that run."""
    return {process for process, fields in _running() if int(fields[2]) == group}


def _running() -> Iterator[tuple[Process, list[str]]]:
    """Processes, with what follows their names in /proc. One that has ended stays there until somebody asks for its
    status."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        if (fields := _stat(int(name))) and _has_threads(fields):
            yield (int(name), fields[19]), fields


def _is_tracker(process: Process) -> bool:
    try:
        with open(f"/proc/{process[0]}/cmdline", "rb") as file:
            return TRACKER in file.read()
    except OSError:
        return False


def _runs(process: Process) -> bool:
    """Whether it still runs: its number may be another's since."""
    fields = _stat(process[0])
    return bool(fields) and _has_threads(fields) and fields[19] == process[1]


def _has_threads(fields: list[str]) -> bool:
    """Its first thread may end before the others."""
    return fields[0] != "Z" or int(fields[17]) > 1


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

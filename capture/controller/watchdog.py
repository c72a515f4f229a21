"""Ends all processes of a group, or of a tree. As a program: a group, once its input is closed, as it is when its
parent is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

PATIENCE, POLL = 10.0, 0.05  # seconds: until SIGKILL after SIGTERM, and as long after it; between two looks
TRACKER, TIDYING = (
    b"multiprocessing.resource_tracker",
    0.3,
)  # it removes the shared memory of others once they have ended


def end_group(group: int, patience: float = PATIENCE) -> None:
    """SIGTERM all that is left of a group, and SIGKILL what has not ended after `patience` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + patience
        if not _lives(group):
            return
        send(group, number)
        while _lives(group) and time.monotonic() < deadline:
            time.sleep(POLL)


def send(group: int, number: int) -> None:
    """Send a signal to all of a group; SIGKILL to those that remove what others leave once they had time for it."""
    if number == signal.SIGKILL:
        kill(
            {(process, fields[19]) for process in _processes() if _is_of(group, process) and (fields := _stat(process))}
        )
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def descendants(root: int) -> set[tuple[int, str]]:
    """The processes that `root` started, and those that these did, in whichever session: each with its start time."""
    by_parent: dict[int, list[tuple[int, str]]] = {}
    for process in _processes():
        if fields := _stat(process):
            by_parent.setdefault(int(fields[1]), []).append((process, fields[19]))
    found, parents = set(), [root]
    while parents:
        children = by_parent.get(parents.pop(), [])
        found |= {*children}
        parents += [process for process, _ in children]
    return found


def kill(processes: set[tuple[int, str]]) -> None:
    """SIGKILL those that still run, of (number, start time); a tracker once it had time for what the others leave."""
    trackers = {each for each in processes if _is_tracker(each[0])}
    for running in (processes - trackers, trackers):
        deadline = time.monotonic() + (TIDYING if running is trackers else 0)
        while any(map(_runs, running)) and time.monotonic() < deadline:
            time.sleep(POLL)
        for process, _ in filter(_runs, running):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def _is_tracker(process: int) -> bool:
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return TRACKER in file.read()
    except OSError:
        return False


def _runs(process: tuple[int, str]) -> bool:
    """Whether it still runs: its number may be another's since."""
    fields = _stat(process[0])
    return bool(fields) and _has_threads(fields) and fields[19] == process[1]


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return any(_is_of(group, process) for process in _processes())


def _is_of(group: int, process: int) -> bool:
    """Whether it is of the group and runs. One that has ended stays in it until somebody asks for its status."""
    fields = _stat(process)
    if not fields:
        return False
    return int(fields[2]) == group and _has_threads(fields)


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

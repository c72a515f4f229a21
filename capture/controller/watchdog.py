"""Ends all processes of a group. As a program: once its input is closed, as it is when its parent is killed."""

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


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return any(_is_of(group, process) for process in os.listdir("/proc") if process.isdigit())


def _is_of(group: int, process: str) -> bool:
    """Whether it is of the group and runs. One that has ended stays in it until somebody asks for its status."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:  # it has just ended
        return False
    state, of, threads = fields[0], int(fields[2]), int(fields[17])
    return of == group and (state != b"Z" or threads > 1)  # its first thread may end before the others


if __name__ == "__main__":
    group = sys.stdin.buffer.read()
    if group:
        end_group(int(group))

"""Limits on what one candidate may use. See setrlimit(2), proc(5) on oom_score_adj."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

DIES_FIRST, LIMITS, PROCESSES = "dies first", "limits", "processes"
ARENAS = 8 << 30  # bytes of address space that allocators and stacks reserve and do not use
FILES = 4096  # descriptors of one process


def die_first() -> None:
    """Where memory runs out the kernel ends this process, and what comes of it, before any other.

    Where no CAP_SYS_RESOURCE sets this, a candidate may take it back for itself: the kernel lets it.
    """
    Path("/proc/self/oom_score_adj").write_text("1000")


def limit(memory: int | None, disk: int) -> None:
    """Bound one process's memory (None: not at all) and each file that it writes, in bytes; no core files.

    Memory is private data over what the process has now; shared mappings are bounded by address space, more loosely.
    """
    _at_most(resource.RLIMIT_CORE, 0)
    _at_most(resource.RLIMIT_FSIZE, disk)
    _at_most(resource.RLIMIT_NOFILE, FILES)
    if memory is not None:
        status = Path("/proc/self/status").read_text()
        _at_most(resource.RLIMIT_DATA, _now(status, "VmData") + memory)
        _at_most(resource.RLIMIT_AS, _now(status, "VmSize") + memory + ARENAS)


def limit_processes(most: int, user: int) -> None:
    """Bound threads and processes: `most` over what `user` runs now. The kernel does not hold user 0 to it."""
    if user == 0:
        raise PermissionError(1, "the kernel does not limit the processes of user 0")
    _at_most(resource.RLIMIT_NPROC, most + _running(user))


def _at_most(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (bound, bound))


def _now(status: str, field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0


def _running(user: int) -> int:
    """Threads of `user` on this machine, as far as they can be seen."""
    total = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                status = Path(entry.path, "status").read_text()
            except OSError:
                continue
            fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            if fields.get("Uid", "").split()[:1] == [str(user)]:
                total += int(fields.get("Threads", "1"))
    return total

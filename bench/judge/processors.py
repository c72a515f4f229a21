"""How much CPU time the processes of a candidate's cage have had: told by the kernel, and not by them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from kcap.bench.integrity.cage.tree import descendants
from kcap.bench.judge.room import check_room

STAT = Path("/proc/stat")
FILES = 2  # of /proc that are open at a time
SCHEDULED = 2  # CPUCLOCK_SCHED, linux/posix-timers.h: all threads of a process, in nanoseconds


@dataclass(frozen=True)
class Used:
    """Nanoseconds of CPU time so far: of the process's first thread, and of all else in its cage (`company`)."""

    own: int
    company: int

    def cpu(self, before: Used) -> int:
        """What the cage has had since `before`."""
        return max(self.own - before.own, 0) + max(self.company - before.company, 0)


@dataclass(frozen=True)
class Machine:
    """Nanoseconds so far: of the clock, of all its processors at work or taken by its host, and of the cages named and
    this process.
    """

    clock: int
    busy: int
    ours: int

    @classmethod
    def now(cls, *pids: int) -> Machine:
        """`pids`: of the cages' candidates."""
        known = [used(pid) for pid in pids]
        ours = time.process_time_ns() + sum(one.own + one.company for one in known)
        return cls(time.monotonic_ns(), _busy_ns(), ours)

    def others(self, before: Machine) -> float:
        """How many processors everybody else had since `before`."""
        taken = self.busy - before.busy - (self.ours - before.ours)
        return max(taken, 0) / max(self.clock - before.clock, 1)


def used(pid: int) -> Used:
    """What the cage of process `pid` has used; zeros where Linux does not tell, OSError where no file can be opened."""
    check_room(FILES)
    own = _first_thread_ns(pid)
    return Used(own, max(sum(_cpu_ns(one) for one in _cage(pid)) - own, 0))


def _first_thread_ns(pid: int) -> int:
    """The first field of a schedstat file (proc(5))."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[0])
    except (OSError, IndexError, ValueError):
        return 0


def _busy_ns() -> int:
    """All of the first line of /proc/stat but idle and iowait (proc(5)); 0 where Linux does not tell."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, STAT.read_text().split()[1:9])
    except (OSError, ValueError):
        return 0
    return (user + nice + system + irq + softirq + steal) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def _cage(pid: int) -> list[int]:
    """All that lives under its parent, which keeps one candidate."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError, ValueError):
        return []
    return descendants(parent) if parent else [pid]


def _cpu_ns(pid: int) -> int:
    """By the clock of another process: clock_getcpuclockid(3)."""
    try:
        return time.clock_gettime_ns((~pid << 3) | SCHEDULED)
    except OSError:
        return 0

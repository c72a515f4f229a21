"""A cgroup that bounds the memory of all of a sandbox's processes together, where this process may make one.

It counts what no limit of a process does: shared mappings, files in memory, the scratch. See cgroups(7).
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path

from kcap.system.memory import memory_controllers

NAME = "memory of all"
SHARED = 512 << 20  # bytes that the judge shares: of its inputs and outputs, which count where they are touched first


@dataclass(frozen=True)
class MemoryGroup:
    """`above`: the folder that it lies in, opened before any mount is made read-only; `processes`: its cgroup.procs."""

    above: int
    name: str
    processes: int

    def enter(self) -> None:
        """Put this process, and all that it will fork, under the limit."""
        os.write(self.processes, b"0")

    def close(self) -> None:
        os.close(self.processes)
        os.close(self.above)

    def remove(self) -> None:
        """Once none of its processes is left."""
        with contextlib.suppress(OSError):
            os.rmdir(self.name, dir_fd=self.above)
        self.close()


def open_group(memory: int) -> MemoryGroup:
    """A new one of `memory` bytes, and what the judge shares; OSError where this process may make none."""
    base, limit = _own_group()
    name = f"kcap-{os.getpid()}"
    above = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=above)  # left by a process that was killed, and whose number this one has now
        os.mkdir(name, dir_fd=above)
        try:
            (base / name / limit).write_text(str(memory + SHARED))
            return MemoryGroup(above, name, os.open(base / name / "cgroup.procs", os.O_WRONLY))
        except OSError:
            os.rmdir(name, dir_fd=above)
            raise
    except OSError:
        os.close(above)
        raise


def _own_group() -> tuple[Path, str]:
    """The folder of the group that this process is in, and the name of the file that limits memory there."""
    for controller in memory_controllers():
        if controller.version == 1:
            return controller.group, controller.limit
        with contextlib.suppress(OSError):
            if "memory" in (controller.group / "cgroup.subtree_control").read_text().split():
                return controller.group, controller.limit
    raise OSError(errno.EOPNOTSUPP, "this process is in no cgroup that it may divide by memory")

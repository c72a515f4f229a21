"""How much of the host's memory this process may still take: the machine's, or what its cgroups leave of it.

cgroups(7) and proc(5); the files of version 2 are those of the kernel's admin-guide/cgroup-v2.rst ("Memory"), of
version 1 those of admin-guide/cgroup-v1/memory.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30


@dataclass(frozen=True)
class MemoryController:
    """`version`: of cgroups; `group`: this process's folder in the hierarchy that is mounted at `mount`."""

    version: int
    mount: Path
    group: Path

    @property
    def limit(self) -> str:
        """The name of the file that limits a group's memory."""
        return "memory.max" if self.version == 2 else "memory.limit_in_bytes"

    def free(self) -> Iterator[int]:
        """Bytes that each group above this process leaves, its own first; files in memory make way."""
        usage, prefix = ("memory.current", "") if self.version == 2 else ("memory.usage_in_bytes", "total_")
        for folder in (self.group, *self.group.parents):
            if not folder.is_relative_to(self.mount):
                return
            try:
                limit, used = (folder / self.limit).read_text().strip(), int((folder / usage).read_text())
                files = re.findall(rf"^{prefix}(?:in)?active_file (\d+)", (folder / "memory.stat").read_text(), re.M)
            except (OSError, ValueError):
                continue  # the root has no limit; of a container's groups those outside of it are not there
            if limit != "max":
                yield max(int(limit) - used + sum(map(int, files)), 0)


def memory_controllers(proc: Path = Path("/proc/self")) -> Iterator[MemoryController]:
    """Where this process's memory may be limited."""
    if not (proc / "cgroup").exists():
        return
    own = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path.lstrip("/")
    for line in (proc / "mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        if kind == "cgroup" and "memory" in options.split(",") and "memory" in own:
            yield MemoryController(1, Path(place), Path(place) / own["memory"])
        if kind == "cgroup2" and "" in own:
            yield MemoryController(2, Path(place), Path(place) / own[""])


def free_memory() -> int:
    """Bytes that can still be allocated on the host."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    machine = int(match[1]) * 1024 if match else 4 * GIB
    return min([machine, *(free for controller in memory_controllers() for free in controller.free())])

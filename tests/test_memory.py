"""How much of the host's memory is free: what the machine has, or less where a cgroup limits this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcap.system import memory
from kcap.system.memory import free_memory, memory_controllers

FILES = {  # by version of cgroups: what limits, what is used, how much of it makes way
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "active_file 7\ntotal_active_file {}\ntotal_inactive_file {}\n",
    ),
    2: ("memory.max", "memory.current", "anon 5\nactive_file {}\ninactive_file {}\n"),
}


def write_group(folder: Path, version: int, limit: object, used: int, files: tuple[int, int] = (0, 0)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = FILES[version]
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(names[2].format(*files))


def write_proc(root: Path, version: int, own: str) -> Path:
    (root / "proc").mkdir()
    (root / "proc" / "cgroup").write_text(f"4:cpu:/x\n7:memory:{own}\n" if version == 1 else f"0::{own}\n")
    kind = ("cgroup", "rw,memory") if version == 1 else ("cgroup2", "rw")
    (root / "proc" / "mounts").write_text(f"tmpfs /tmp tmpfs rw 0 0\ncgroup {root / 'mount'} {kind[0]} {kind[1]} 0 0\n")
    return root / "proc"


@pytest.mark.parametrize("version", [1, 2])
def test_each_group_above_a_process_leaves_it_less(tmp_path: Path, version: int) -> None:
    write_group(tmp_path / "mount" / "a", version, 1000, 900, (100, 50))
    write_group(tmp_path / "mount" / "a" / "b", version, 600, 700)
    (controller,) = memory_controllers(write_proc(tmp_path, version, "/a/b"))
    assert list(controller.free()) == [0, 250]


def test_in_a_container_the_mount_is_the_processes_own_group(tmp_path: Path) -> None:
    write_group(tmp_path / "mount", 1, 1000, 400)
    (controller,) = memory_controllers(write_proc(tmp_path, 1, "/docker/0123"))
    assert list(controller.free()) == [600]


def test_a_group_without_a_limit_leaves_all(tmp_path: Path) -> None:
    write_group(tmp_path / "mount", 2, "max", 400)
    (controller,) = memory_controllers(write_proc(tmp_path, 2, "/"))
    assert not list(controller.free())
    assert not list(memory_controllers(tmp_path))


def test_the_least_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = free_memory()
    write_group(tmp_path / "mount", 2, 5000, 400)
    proc = write_proc(tmp_path, 2, "/")
    monkeypatch.setattr(memory, "memory_controllers", lambda: memory_controllers(proc))
    assert free_memory() == 4600 < machine

"""Namespaces: what the candidate does not see it cannot touch. See namespaces(7), user_namespaces(7).

A process without CAP_SYS_ADMIN gets the others from a user namespace of its own, in which its user stays its user.
"""

from __future__ import annotations

import os
from pathlib import Path

from kcap.bench.integrity.cage import calls
from kcap.bench.integrity.cage.pieces import Pieces

USERS, MOUNTS, PIDS = "user namespace", "mount namespace", "pid namespace"
OTHERS = {"network namespace": calls.NEW_NETWORK, "ipc namespace": calls.NEW_IPC}
NETWORK = "network namespace"
CAP_SYS_ADMIN = 1 << 21


def enter(pieces: Pieces, kept: tuple[int, int] | None) -> None:
    """Leave the judge's namespaces for new ones. Of `kept` (user, mount) a new process goes on in those instead."""
    if not effective() & CAP_SYS_ADMIN:
        pieces.attempt(USERS, lambda: _same_users(kept[0]) if kept else _new_users())
    pieces.attempt(MOUNTS, lambda: _same_mounts(kept[1]) if kept else calls.unshare(calls.NEW_MOUNTS))
    pieces.attempt(PIDS, lambda: calls.unshare(calls.NEW_PIDS))
    for name, flag in OTHERS.items():
        pieces.attempt(name, lambda flag=flag: calls.unshare(flag))  # type: ignore[misc]


def effective() -> int:
    """This process's effective capabilities, as bits."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


def opened(pid: int) -> tuple[int, int]:
    """Descriptors of the user and the mount namespace of process `pid`, which keep both when it has ended."""
    users = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    try:
        return users, os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    except OSError:
        os.close(users)
        raise


def _new_users() -> None:
    user, group = os.geteuid(), os.getegid()
    calls.unshare(calls.NEW_USERS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _same_users(descriptor: int) -> None:
    calls.setns(descriptor, calls.NEW_USERS)


def _same_mounts(descriptor: int) -> None:
    """Join the mounts of an earlier cage, and part from them at once: what is mounted from here on is this one's."""
    calls.setns(descriptor, calls.NEW_MOUNTS)
    calls.unshare(calls.NEW_MOUNTS)

"""What the candidate sees: what it does not see it cannot touch.

See namespaces(7), user_namespaces(7), mount(2), proc(5).

A process without CAP_SYS_ADMIN gets namespaces from a user namespace of its own, in which its user stays its user.

In its mount namespace all of the disk is read-only, hidden folders are empty, and its scratch has a fixed size
(tmpfs(5)): nothing of this is seen, or left behind, outside.

In its own /proc its processes may write to their own files, as CUDA does, and to nothing else. User 0 owns the kernel's
switches, so it is held closer: Landlock opens the candidate's own folder alone, and all of /proc stays read-only where
the network is the judge's, as /proc/self/net has that network's switches.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kcap.bench.sandbox import libc
from kcap.bench.sandbox.spec import Features

USER_NAMESPACE, MOUNT_NAMESPACE, PID_NAMESPACE = "user namespace", "mount namespace", "pid namespace"
OTHER_NAMESPACES = {"network namespace": libc.NEW_NETWORK, "ipc namespace": libc.NEW_IPC}
NETWORK_NAMESPACE = "network namespace"
CAP_SYS_ADMIN = 1 << 21


def enter_namespaces(features: Features, kept: tuple[int, int] | None) -> None:
    """Leave the judge's namespaces for new ones. Of `kept` (user, mount) a new process goes on in those instead."""
    if not effective_capabilities() & CAP_SYS_ADMIN:
        features.attempt(USER_NAMESPACE, lambda: _same_users(kept[0]) if kept else _new_users())
    features.attempt(MOUNT_NAMESPACE, lambda: _same_mounts(kept[1]) if kept else libc.unshare(libc.NEW_MOUNTS))
    features.attempt(PID_NAMESPACE, lambda: libc.unshare(libc.NEW_PIDS))
    for name, flag in OTHER_NAMESPACES.items():
        features.attempt(name, lambda flag=flag: libc.unshare(flag))  # type: ignore[misc]


def effective_capabilities() -> int:
    """This process's effective capabilities, as bits."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


def open_namespaces(pid: int) -> tuple[int, int]:
    """Descriptors of the user and the mount namespace of process `pid`, which keep both when it has ended."""
    users = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    try:
        return users, os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    except OSError:
        os.close(users)
        raise


def _new_users() -> None:
    user, group = os.geteuid(), os.getegid()
    libc.unshare(libc.NEW_USERS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _same_users(descriptor: int) -> None:
    libc.setns(descriptor, libc.NEW_USERS)


def _same_mounts(descriptor: int) -> None:
    """Join the mounts of an earlier sandbox, and part from them at once: what is mounted from here on is this one's."""
    libc.setns(descriptor, libc.NEW_MOUNTS)
    libc.unshare(libc.NEW_MOUNTS)


READ_ONLY_FILES, HIDDEN_FOLDERS, SCRATCH_MOUNT, OWN_SHM = "read-only files", "hidden folders", "scratch", "own /dev/shm"
OPENED_FOLDERS = "opened folders"
MOUNTED = (READ_ONLY_FILES, HIDDEN_FOLDERS, OPENED_FOLDERS, SCRATCH_MOUNT, OWN_SHM)
SHM_FOLDER = Path("/dev/shm")
PLAIN_MOUNT = libc.MS_NOSUID | libc.MS_NODEV
SCRATCH_INODES = 1 << 15  # inodes of the scratch: each costs the kernel about a KiB


def set_up_mounts(
    folder: Path, hidden: tuple[Path, ...], needed: Iterable[Path], disk: int, owner: int, features: Features
) -> None:
    """Mount all but /proc. `disk` is in bytes; `owner` is the user that may write, and read below `needed`."""
    libc.mount("none", "/", None, libc.MS_REC | libc.MS_PRIVATE)
    features.attempt(OPENED_FOLDERS, lambda: _open_folders([*needed, folder], owner))
    features.attempt(READ_ONLY_FILES, libc.make_all_mounts_read_only)
    features.attempt(HIDDEN_FOLDERS, lambda: _hide(hidden, folder))
    room = f"size={disk},nr_inodes={SCRATCH_INODES},uid={owner}"
    features.attempt(SCRATCH_MOUNT, lambda: libc.mount("tmpfs", str(folder), "tmpfs", PLAIN_MOUNT, f"{room},mode=0700"))
    features.attempt(OWN_SHM, lambda: libc.mount("tmpfs", str(SHM_FOLDER), "tmpfs", PLAIN_MOUNT, f"{room},mode=1777"))


def _open_folders(needed: Sequence[Path], user: int) -> None:
    """Where a folder above `needed` is closed to `user`, put an empty one in its place, in which `needed` alone is."""
    closed: dict[Path, set[Path]] = {}
    for path in {path.resolve() for path in needed}:
        above = next((each for each in reversed(path.parents) if _is_closed(each, user)), None)
        if above is not None:
            closed.setdefault(above, set()).add(path)
    for above, paths in closed.items():
        opened = [(path, os.open(path, os.O_PATH | os.O_DIRECTORY)) for path in sorted(paths)]
        libc.mount("tmpfs", str(above), "tmpfs", PLAIN_MOUNT, "size=1m,nr_inodes=1024,mode=0755")
        for path, descriptor in opened:
            path.mkdir(parents=True, exist_ok=True)
            libc.mount(f"/proc/self/fd/{descriptor}", str(path), None, libc.MS_BIND | libc.MS_REC)
            os.close(descriptor)


def _is_closed(folder: Path, user: int) -> bool:
    status = folder.stat()
    return user != 0 and not status.st_mode & (stat.S_IXUSR if status.st_uid == user else stat.S_IXOTH)


def _hide(hidden: tuple[Path, ...], folder: Path) -> None:
    """Cover each folder with an empty file system; one that holds the scratch keeps the way to it. A file is empty
    then, and a device cannot be opened.
    """
    for path in sorted(hidden):
        if path.is_dir():
            libc.mount("tmpfs", str(path), "tmpfs", PLAIN_MOUNT, "size=64k,nr_inodes=64,mode=0755")
            if folder.is_relative_to(path):
                folder.mkdir(parents=True, exist_ok=True)
            libc.mount(None, str(path), None, libc.MS_REMOUNT | libc.MS_RDONLY | PLAIN_MOUNT)
        elif path.is_char_device():
            _bind_mount(str(path), libc.MS_RDONLY)
        elif path.exists():
            libc.mount(os.devnull, str(path), None, libc.MS_BIND)


OWN_PROC = "own /proc"
_PROC_FLAGS = libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC


def mount_own_proc(features: Features, user: int) -> None:
    """Mount it for a candidate that will be `user`, or open its own folder in the judge's, which is read-only."""
    if not features.holds(MOUNT_NAMESPACE):
        return
    writable = user != 0 or features.holds(NETWORK_NAMESPACE)
    own = features.holds(PID_NAMESPACE) and features.attempt(OWN_PROC, lambda: _mount_proc(writable))
    if writable and not own:
        with contextlib.suppress(OSError):
            _bind_mount("/proc/self", 0)


def writable_proc(features: Features) -> Path:
    """Below which Landlock is to let this process write: the folders of its children too, or its own alone."""
    return Path("/proc" if features.holds(OWN_PROC) and os.geteuid() != 0 else "/proc/self")


def _mount_proc(writable: bool) -> None:
    """A /proc of this pid namespace, in which no process outside has a folder.

    It is opened once all in it that is not the candidate's is read-only; where that fails it stays read-only.
    """
    libc.mount("proc", "/proc", "proc", _PROC_FLAGS | libc.MS_RDONLY)
    if writable:
        with contextlib.suppress(OSError):
            for path in _not_the_candidates():
                _bind_mount(path, libc.MS_RDONLY)
            libc.mount(None, "/proc", None, libc.MS_REMOUNT | _PROC_FLAGS)


def _not_the_candidates() -> Iterator[str]:
    """The kernel's switches, and process 1, which keeps the candidate."""
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name == "1" or not (entry.name.isdigit() or entry.is_symlink()):
                yield entry.path


def _bind_mount(path: str, access: int) -> None:
    """A mount of its own for `path`, with `access`."""
    libc.mount(path, path, None, libc.MS_BIND)
    libc.mount(None, path, None, libc.MS_REMOUNT | libc.MS_BIND | _PROC_FLAGS | access)

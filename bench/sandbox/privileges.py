"""What the candidate is, and what it may use: a user of its own where root judges, no capabilities, resource limits.

See capabilities(7), prctl(2), setrlimit(2), proc(5) on oom_score_adj.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

from kcap.bench.sandbox import libc
from kcap.bench.sandbox.namespaces import effective_capabilities
from kcap.bench.sandbox.spec import Features

OWN_USER, NO_CAPABILITIES, ONLY_READING, NO_NEW_PRIVILEGES = (
    "own user",
    "no capabilities",
    "no capability but reading",
    "no new privileges",
)

FIRST_USER, USER_COUNT = 61184, 4336  # where systemd, too, takes users that exist only while a service runs
GPU_DEVICES = ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm")
_CHANGE_USER = 1 << 0 | 1 << 6 | 1 << 7  # CAP_CHOWN, CAP_SETGID, CAP_SETUID,
_READ_ITS_MEMORY = 1 << 19  # and CAP_SYS_PTRACE, as the judge reads a candidate's outputs where they are
_SEARCH = 2  # CAP_DAC_READ_SEARCH
_RAISE = 2  # PR_CAP_AMBIENT_RAISE


def user_for(folder: Path) -> int:
    """The user that owns the scratch `folder`, the same one each time; OSError where this process cannot be it."""
    needed = _CHANGE_USER | _READ_ITS_MEMORY
    if effective_capabilities() & needed != needed:
        raise OSError(errno.EPERM, "only root can become another user")
    for pattern in GPU_DEVICES:
        for device in Path("/dev").glob(pattern):
            if device.stat().st_mode & 0o006 != 0o006:
                raise OSError(errno.EACCES, f"{device} is not open to every user")
    user = FIRST_USER + zlib.crc32(os.fsencode(folder)) % USER_COUNT
    if not any(first <= user < first + length for first, length in _mapped_users()):
        raise OSError(errno.EINVAL, f"user {user} is outside of this user namespace")
    return user


def drop_privileges(user: int | None, needed: Iterable[Path], features: Features) -> None:
    """Become `user` (None: stay who one is), and give up every capability and the way to new ones.

    Where an interpreter's or a library's folder is closed to that user, the capability to read files is all that stays.
    """
    libc.prctl(libc.PR_SET_KEEPCAPS, 1)
    if user is not None and not features.attempt(OWN_USER, lambda: _switch(user)):
        raise OSError(errno.EPERM, features.refused[OWN_USER])
    if NO_CAPABILITIES not in features.without:
        kept = _kept([*needed])
        name = ONLY_READING if kept else NO_CAPABILITIES
        features.attempt(name, lambda: _give_up(kept))
    features.attempt(NO_NEW_PRIVILEGES, lambda: libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1))


SEARCHED = (
    "PATH",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
)  # variables that name folders with programs and libraries


def needed_folders() -> list[Path]:
    """Folders without which Python, and what is installed for it or called from it, does not work."""
    named = [entry for name in SEARCHED for entry in os.environ.get(name, "").split(os.pathsep)]
    every = (sys.prefix, sys.base_prefix, *sys.path, *named)
    return [Path(entry) for entry in every if os.path.isabs(entry) and os.path.isdir(entry)]


def _switch(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.environ.update(USER=f"u{user}", LOGNAME=f"u{user}")  # this user is in no table of users


def _kept(needed: list[Path]) -> int:
    """The capabilities without which a folder of `needed` cannot be listed, as bits."""
    permitted = _permitted_capabilities()
    if not permitted >> _SEARCH & 1:
        return 0
    libc.capset(0, permitted)
    closed = any(not _listable(path) for path in needed)
    libc.capset(permitted, permitted)
    return 1 << _SEARCH if closed else 0


def _listable(path: Path) -> bool:
    try:
        os.scandir(path).close()
    except OSError:
        return False
    return True


def _give_up(kept: int) -> None:
    if effective_capabilities() >> 8 & 1:  # CAP_SETPCAP
        last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
        for number in range(last + 1):
            if not kept >> number & 1:
                libc.prctl(libc.PR_CAPBSET_DROP, number)
    libc.capset(kept, kept, kept)
    if kept:
        libc.prctl(libc.PR_CAP_AMBIENT, _RAISE, _SEARCH)


def _permitted_capabilities() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapPrm:")), 0)


def _mapped_users() -> list[tuple[int, int]]:
    """First user and number of users of each range of this user namespace."""
    lines = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return [(int(first), int(length)) for first, _, length in lines]


DIES_FIRST, RESOURCE_LIMITS, PROCESS_LIMIT = "dies first", "limits", "processes"
ARENAS = 8 << 30  # bytes of address space that allocators and stacks reserve and do not use
MOST_OPEN_FILES = 4096  # descriptors of one process


def die_first() -> None:
    """Where memory runs out the kernel ends this process, and what comes of it, before any other.

    Where no CAP_SYS_RESOURCE sets this, a candidate may take it back for itself: the kernel lets it.
    """
    Path("/proc/self/oom_score_adj").write_text("1000")


def limit_resources(memory: int | None, disk: int) -> None:
    """Bound one process's memory (None: not at all) and each file that it writes, in bytes; no core files.

    Memory is private data over what the process has now; shared mappings are bounded by address space, more loosely.
    """
    _at_most(resource.RLIMIT_CORE, 0)
    _at_most(resource.RLIMIT_FSIZE, disk)
    _at_most(resource.RLIMIT_NOFILE, MOST_OPEN_FILES)
    if memory is not None:
        status = Path("/proc/self/status").read_text()
        _at_most(resource.RLIMIT_DATA, _status_bytes(status, "VmData") + memory)
        _at_most(resource.RLIMIT_AS, _status_bytes(status, "VmSize") + memory + ARENAS)


def limit_processes(most: int, user: int) -> None:
    """Bound threads and processes: `most` over what `user` runs now. The kernel does not hold user 0 to it."""
    if user == 0:
        raise PermissionError(1, "the kernel does not limit the processes of user 0")
    _at_most(resource.RLIMIT_NPROC, most + _threads_of(user))


def _at_most(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (bound, bound))


def _status_bytes(status: str, field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0


def _threads_of(user: int) -> int:
    """Threads of `user` on this machine, as far as they can be seen."""
    total = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                status = Path(entry.path, "status").read_text(errors="replace")
            except OSError:
                continue
            fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            if fields.get("Uid", "").split()[:1] == [str(user)]:
                total += int(fields.get("Threads", "1"))
    return total

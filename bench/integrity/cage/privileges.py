"""What the candidate is: a user of its own where root judges, without capabilities. See capabilities(7), prctl(2)."""

from __future__ import annotations

import errno
import os
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

from kcap.bench.integrity.cage import calls
from kcap.bench.integrity.cage.namespaces import effective
from kcap.bench.integrity.cage.pieces import Pieces

USER, CAPABILITIES, READING, NO_NEW = "own user", "no capabilities", "no capability but reading", "no new privileges"
FIRST_USER, USERS = 61184, 4336  # where systemd, too, takes users that exist only while a service runs
GPU = ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm")
_BECOMING = 1 << 0 | 1 << 6 | 1 << 7  # CAP_CHOWN, CAP_SETGID, CAP_SETUID
_SEARCH = 2  # CAP_DAC_READ_SEARCH
_RAISE = 2  # PR_CAP_AMBIENT_RAISE


def user_for(folder: Path) -> int:
    """The user that owns the scratch `folder`, the same one each time; OSError where this process cannot be it."""
    if effective() & _BECOMING != _BECOMING:
        raise OSError(errno.EPERM, "only root can become another user")
    for pattern in GPU:
        for device in Path("/dev").glob(pattern):
            if device.stat().st_mode & 0o006 != 0o006:
                raise OSError(errno.EACCES, f"{device} is not open to every user")
    user = FIRST_USER + zlib.crc32(os.fsencode(folder)) % USERS
    if not any(first <= user < first + length for first, length in _mapped()):
        raise OSError(errno.EINVAL, f"user {user} is outside of this user namespace")
    return user


def become(user: int | None, needed: Iterable[Path], pieces: Pieces) -> None:
    """Become `user` (None: stay who one is), and give up every capability and the way to new ones.

    Where an interpreter's or a library's folder is closed to that user, the capability to read files is all that stays.
    """
    calls.prctl(calls.PR_SET_KEEPCAPS, 1)
    if user is not None and not pieces.attempt(USER, lambda: _switch(user)):
        raise OSError(errno.EPERM, pieces.refused[USER])
    if CAPABILITIES not in pieces.without:
        kept = _kept([*needed])
        name = READING if kept else CAPABILITIES
        pieces.attempt(name, lambda: _give_up(kept))
    pieces.attempt(NO_NEW, lambda: calls.prctl(calls.PR_SET_NO_NEW_PRIVS, 1))


def needed_to_import() -> list[Path]:
    """Folders without which Python, and what is installed for it, does not work."""
    return [Path(entry) for entry in (sys.prefix, sys.base_prefix, *sys.path) if os.path.isdir(entry)]


def _switch(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.environ.update(USER=f"u{user}", LOGNAME=f"u{user}")  # this user is in no table of users


def _kept(needed: list[Path]) -> int:
    """The capabilities without which a folder of `needed` cannot be listed, as bits."""
    permitted = _permitted()
    if not permitted >> _SEARCH & 1:
        return 0
    calls.capset(0, permitted)
    closed = any(not _listable(path) for path in needed)
    calls.capset(permitted, permitted)
    return 1 << _SEARCH if closed else 0


def _listable(path: Path) -> bool:
    try:
        os.scandir(path).close()
    except OSError:
        return False
    return True


def _give_up(kept: int) -> None:
    if effective() >> 8 & 1:  # CAP_SETPCAP
        last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
        for number in range(last + 1):
            if not kept >> number & 1:
                calls.prctl(calls.PR_CAPBSET_DROP, number)
    calls.capset(kept, kept, kept)
    if kept:
        calls.prctl(calls.PR_CAP_AMBIENT, _RAISE, _SEARCH)


def _permitted() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapPrm:")), 0)


def _mapped() -> list[tuple[int, int]]:
    """First user and number of users of each range of this user namespace."""
    lines = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return [(int(first), int(length)) for first, _, length in lines]

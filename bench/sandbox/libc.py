"""The system calls that the standard library lacks. Each raises OSError with the call's name.

Numbers are those of x86-64 and aarch64, which agree on every call newer than Linux 5.1.
"""

from __future__ import annotations

import ctypes
import os

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47

NEW_MOUNTS = 0x00020000
NEW_IPC = 0x08000000
NEW_USERS = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000

_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY = 1

_libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """`result`, or the OSError that a result of -1 stands for."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(what: str, number: int, *arguments: int | ctypes.c_void_p) -> int:
    """One raw system call; pointers are given as c_void_p."""
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return checked(_libc.syscall(ctypes.c_long(number), *wide), what)


def prctl(option: int, *arguments: int | ctypes.c_void_p) -> int:
    """prctl(2); arguments that are left out are 0, as the newer options demand."""
    wide = [ctypes.c_ulong(argument) if isinstance(argument, int) else argument for argument in arguments]
    wide += [ctypes.c_ulong(0)] * (4 - len(wide))
    return checked(_libc.prctl(ctypes.c_int(option), *wide), f"prctl {option}")


def unshare(flag: int) -> None:
    checked(_libc.unshare(ctypes.c_int(flag)), "unshare")


def setns(descriptor: int, flag: int) -> None:
    checked(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(flag)), "setns")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    device, mount_point, filesystem, data = texts
    checked(_libc.mount(device, mount_point, filesystem, ctypes.c_ulong(flags), data), f"mount {target}")


def make_all_mounts_read_only() -> None:
    """mount_setattr(2) on `/` and on everything below it; devices stay writable, as they are on any read-only mount."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    root = ctypes.c_char_p(b"/")
    pointers = ctypes.cast(root, ctypes.c_void_p), ctypes.cast(attributes, ctypes.c_void_p)
    size = ctypes.sizeof(attributes)
    syscall("mount_setattr", _MOUNT_SETATTR, _AT_FDCWD, pointers[0], _AT_RECURSIVE, pointers[1], size)


def capset(effective: int, permitted: int, inheritable: int = 0) -> None:
    """capset(2) for this process; each a set of bits."""
    version_3 = 0x20080522
    sets = (effective, permitted, inheritable)
    words = [bits >> shift & 0xFFFFFFFF for shift in (0, 32) for bits in sets]
    checked(_libc.capset((ctypes.c_uint32 * 2)(version_3, 0), (ctypes.c_uint32 * 6)(*words)), "capset")

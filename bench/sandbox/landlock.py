"""Landlock: which files a process may write, and that it signals and connects to nobody outside. See landlock(7).

Asked by its ABI at run time. ABI 1 is not used: it refuses every rename from one folder to another, which compilers'
caches do. Rights from ABI 2: rename, 3: truncate, 4: TCP, 5: ioctl on devices, 6: signals and abstract sockets.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from kcap.bench.sandbox import libc

NAME, SIGNALS = "landlock", "landlock signals"
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE, _READ, _LIST = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_RENAME, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_LOOK = _EXECUTE | _READ | _LIST
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract sockets, signals
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
GPU_DEVICES = ("nvidia*", "nvidia-caps/*", "dxg")  # dxg: the GPU of a Windows host


def abi() -> int:
    """The version of Landlock that the kernel offers; OSError where it is off or too old to be of use."""
    abi = libc.syscall("landlock", _CREATE, ctypes.c_void_p(None), 0, 1)
    if abi < 2:
        raise OSError(errno.EOPNOTSUPP, "landlock ABI 1 refuses renames between folders")
    return abi


def check_signals() -> None:
    """OSError where this kernel's Landlock does not keep signals within."""
    if abi() < 6:
        raise OSError(errno.EOPNOTSUPP, "landlock before ABI 6 does not hold signals")


def restrict(writable: Iterable[Path], hidden: Iterable[Path], scopes: bool, proc: Path) -> None:
    """Confine this process and all that come of it: write below `writable`, read what is not below `hidden`, use the
    devices that Solutions need and that are not hidden.

    The files of processes below `proc` may be written too. The parents of a hidden folder cannot be listed. OSError
    where the kernel refuses.
    """
    version = abi()
    rights = _rights(version)
    ruleset = _create(rights, version, scopes)
    try:
        for path in _shown(Path("/"), [*hidden]):
            _allow(ruleset, path, rights & _LOOK)
        for path in writable:
            _allow(ruleset, path, rights)
        for path in set(_devices()).difference(hidden):
            _allow(ruleset, path, rights & (_READ | _WRITE | _TRUNCATE | _IOCTL))
        _allow(ruleset, proc, rights & (_READ | _LIST | _WRITE | _TRUNCATE))
        libc.syscall("landlock", _RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _rights(version: int) -> int:
    """Every right on files that this ABI knows, so that nothing is left free by not being named."""
    newest = _IOCTL if version >= 5 else _TRUNCATE if version >= 3 else _RENAME
    return newest * 2 - 1


def _create(rights: int, version: int, scopes: bool) -> int:
    words = [rights, *([_TCP] if version >= 4 else []), *([_SCOPES if scopes else 0] if version >= 6 else [])]
    attributes = (ctypes.c_uint64 * len(words))(*words)
    pointer = ctypes.cast(attributes, ctypes.c_void_p)
    return libc.syscall("landlock", _CREATE, pointer, ctypes.sizeof(attributes), 0)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    """One rule; a path that is gone needs none."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fitting = rights if path.is_dir() else rights & _OF_FILES
        rule = ctypes.create_string_buffer(fitting.to_bytes(8, "little") + descriptor.to_bytes(4, "little"), 12)
        libc.syscall("landlock", _ADD, ruleset, 1, ctypes.cast(rule, ctypes.c_void_p), 0)
    finally:
        os.close(descriptor)


def _shown(path: Path, hidden: list[Path]) -> Iterator[Path]:
    """The fewest paths that together are everything below `path` but `hidden`."""
    if path in hidden:
        return
    if not any(folder.is_relative_to(path) for folder in hidden):
        yield path
        return
    try:
        entries = sorted(path.iterdir())
    except OSError:
        return
    for entry in entries:
        if not entry.is_symlink():  # its target is shown or hidden by its own place
            yield from _shown(entry, hidden)


def _devices() -> Iterator[Path]:
    for pattern in (*DEVICES, *GPU_DEVICES):
        yield from Path("/dev").glob(pattern)

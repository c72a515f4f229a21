"""A filter of system calls, written as BPF and given to the kernel by prctl: no library. See seccomp(2).

What is refused fails with EPERM, so that a library that asks for something needless goes on. What CUDA needs stays:
ioctl, mmap, madvise, mbind, sched_setaffinity, eventfd, memfd_create, Unix sockets and threads.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct

from kcap.bench.integrity.cage import calls, syscalls

NAME = "seccomp"
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the tables, AUDIT_ARCH
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000
_NAMESPACES = 0x7E020000  # clone's flags: mount, cgroup, uts, ipc, user, pid, network
_OWNERS = (8, 15)  # fcntl: F_SETOWN, F_SETOWN_EX choose whom a descriptor signals
_OPEN_FAMILIES = (socket.AF_UNIX, socket.AF_NETLINK)
Program = list[tuple[int, int, int, int]]  # code, jump if true, jump if false, operand


def restrict(network: bool, signals: bool, limits: bool) -> None:
    """Install the filter for this process and all that come of it.

    `network`, `signals` and `limits` (of another process) refuse these too, where nothing else holds them. OSError on
    another architecture.
    """
    if platform.machine() not in ARCHITECTURES:
        raise OSError(errno.EOPNOTSUPP, f"no table of system calls for {platform.machine()}")
    program = build(platform.machine(), network, signals, limits, os.getpid())
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    instructions = ctypes.create_string_buffer(packed, len(packed))
    header = struct.pack("@HP", len(program), ctypes.addressof(instructions))
    filter_mode = 2
    calls.prctl(calls.PR_SET_SECCOMP, filter_mode, ctypes.cast(ctypes.create_string_buffer(header), ctypes.c_void_p))


def build(machine: str, network: bool, signals: bool, limits: bool, own: int) -> Program:
    """The filter's instructions for `machine`; `own` is the only process that may be signalled and limited."""
    column, architecture = ARCHITECTURES[machine]
    program = [_load(_ARCHITECTURE), (_EQUAL, 1, 0, architecture), _fail(errno.EPERM), _load(_NUMBER)]
    if machine == "x86_64":
        program += _if(_AT_LEAST, _X32)  # the same calls under other numbers
    for numbers in syscalls.REFUSED.values():
        program += _refuse(numbers[column])
    program += _refuse(syscalls.CLONE3[column], errno.ENOSYS)  # its flags are out of reach: libc falls back to clone
    program += _unless(syscalls.CLONE[column], 0, [(_ANY_BIT, 0, 1, _NAMESPACES), _fail(errno.EPERM)])
    if network:
        program += _unless(syscalls.SOCKET[column], 0, _only(_OPEN_FAMILIES))
    if signals:
        program += _no_signals(column, own)
    if limits:
        program += _unless(syscalls.PRLIMIT[column], 0, _only((0, own)))
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _no_signals(column: int, own: int) -> Program:
    program: Program = []
    for numbers in syscalls.SIGNALS.values():
        program += _refuse(numbers[column])
    for numbers in syscalls.OWN_PROCESS_ONLY.values():
        program += _unless(numbers[column], 0, _only((own,)))
    owners: Program = [(_EQUAL, 0, 1, _OWNERS[0]), _fail(errno.EPERM), (_EQUAL, 0, 1, _OWNERS[1]), _fail(errno.EPERM)]
    return program + _unless(syscalls.FCNTL[column], 1, owners)


def _refuse(number: int | None, error: int = errno.EPERM) -> Program:
    return [] if number is None else [*_if(_EQUAL, number, error)]


def _if(test: int, operand: int, error: int = errno.EPERM) -> Program:
    return [(test, 0, 1, operand), _fail(error)]


def _unless(number: int, argument: int, tests: Program) -> Program:
    """Where the call is `number`, load the low half of its argument and run `tests`; then load the number again."""
    body = [_load(_ARGUMENTS + 8 * argument), *tests, _load(_NUMBER)]
    return [(_EQUAL, 0, len(body), number), *body]


def _only(values: tuple[int, ...]) -> Program:
    """Fail unless the loaded argument is one of `values`."""
    tests: Program = [(_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    return [*tests, _fail(errno.EPERM)]


def _load(offset: int) -> tuple[int, int, int, int]:
    return (_LOAD, 0, 0, offset)


def _fail(error: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _FAIL | error)

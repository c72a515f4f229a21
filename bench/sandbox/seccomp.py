"""A filter of system calls, written as BPF and given to the kernel by prctl: no library. See seccomp(2).

What is refused fails with EPERM, so that a library that asks for something needless goes on. What CUDA needs stays:
ioctl, mmap, madvise, mbind, eventfd, Unix sockets and threads; UNCOUNTED_CALLS where a GPU is used.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct

from kcap.bench.sandbox import libc

NAME = "seccomp"
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the tables, AUDIT_ARCH
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000
_NAMESPACES = 0x7E020000  # clone's flags: mount, cgroup, uts, ipc, user, pid, network
_OWNERS = (8, 15)  # fcntl: F_SETOWN, F_SETOWN_EX choose whom a descriptor signals
_SIGNAL_OF_A_FILE = 10  # fcntl: F_SETSIG
_OPEN_FAMILIES = (socket.AF_UNIX, socket.AF_NETLINK)
Program = list[tuple[int, int, int, int]]  # code, jump if true, jump if false, operand


def restrict(network: bool, signals: bool, limits: bool, counted: bool) -> None:
    """Install the filter for this process and all that come of it.

    `network`, `signals` and `limits` (of another process) refuse these too, where nothing else holds them; `counted`
    refuses memory that no limit of a process counts, other processors, and signals of the kernel's that let a stopped
    process run. OSError on another architecture.
    """
    if platform.machine() not in ARCHITECTURES:
        raise OSError(errno.EOPNOTSUPP, f"no table of system calls for {platform.machine()}")
    program = build(platform.machine(), network, signals, limits, counted, os.getpid())
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    instructions = ctypes.create_string_buffer(packed, len(packed))
    header = struct.pack("@HP", len(program), ctypes.addressof(instructions))
    filter_mode = 2
    libc.prctl(libc.PR_SET_SECCOMP, filter_mode, ctypes.cast(ctypes.create_string_buffer(header), ctypes.c_void_p))


def build(machine: str, network: bool, signals: bool, limits: bool, counted: bool, own: int) -> Program:
    """The filter's instructions for `machine`; `own` is the only process that may be signalled and limited."""
    column, architecture = ARCHITECTURES[machine]
    program = [_load(_ARCHITECTURE), (_EQUAL, 1, 0, architecture), _fail(errno.EPERM), _load(_NUMBER)]
    if machine == "x86_64":
        program += _fail_if(_AT_LEAST, _X32)  # the same calls under other numbers
    for numbers in REFUSED_CALLS.values():
        program += _refuse(numbers[column])
    program += _refuse(CLONE3[column], errno.ENOSYS)  # its flags are out of reach: libc falls back to clone
    program += _unless(CLONE[column], 0, [(_ANY_BIT, 0, 1, _NAMESPACES), _fail(errno.EPERM)])
    if network:
        program += _unless(SOCKET[column], 0, _only_values(_OPEN_FAMILIES))
    if signals:
        program += _no_signals(column, own)
    if counted:
        for numbers in UNCOUNTED_CALLS.values():
            program += _refuse(numbers[column])
        program += _unless(FCNTL[column], 1, [(_EQUAL, 0, 1, _SIGNAL_OF_A_FILE), _fail(errno.EPERM)])
    if limits:
        program += _unless(PRLIMIT[column], 0, _only_values((0, own)))
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _no_signals(column: int, own: int) -> Program:
    program: Program = []
    for numbers in SIGNAL_CALLS.values():
        program += _refuse(numbers[column])
    for numbers in OWN_PROCESS_ONLY.values():
        program += _unless(numbers[column], 0, _only_values((own,)))
    owners: Program = [(_EQUAL, 0, 1, _OWNERS[0]), _fail(errno.EPERM), (_EQUAL, 0, 1, _OWNERS[1]), _fail(errno.EPERM)]
    return program + _unless(FCNTL[column], 1, owners)


def _refuse(number: int | None, error: int = errno.EPERM) -> Program:
    return [] if number is None else [*_fail_if(_EQUAL, number, error)]


def _fail_if(test: int, operand: int, error: int = errno.EPERM) -> Program:
    return [(test, 0, 1, operand), _fail(error)]


def _unless(number: int, argument: int, tests: Program) -> Program:
    """Where the call is `number`, load the low half of its argument and run `tests`; then load the number again."""
    body = [_load(_ARGUMENTS + 8 * argument), *tests, _load(_NUMBER)]
    return [(_EQUAL, 0, len(body), number), *body]


def _only_values(values: tuple[int, ...]) -> Program:
    """Fail unless the loaded argument is one of `values`."""
    tests: Program = [(_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [*tests, _fail(errno.EPERM)]


def _load(offset: int) -> tuple[int, int, int, int]:
    return (_LOAD, 0, 0, offset)


def _fail(error: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _FAIL | error)


REFUSED_CALLS: dict[str, tuple[int | None, int | None]] = {
    # another process's memory and descriptors
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # the view of the file system, and the way around it
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    # new namespaces bring new privileges
    "unshare": (272, 97),
    "setns": (308, 268),
    # large parts of the kernel that a kernel's benchmark has no use for
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # the machine itself
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "iopl": (172, None),
    "ioperm": (173, None),
}


# Refused by their arguments, or only where no namespace makes them harmless.
CLONE, CLONE3, FCNTL, SOCKET, PRLIMIT = (56, 220), (435, 435), (72, 25), (41, 198), (302, 261)
UNCOUNTED_CALLS = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "sched_setaffinity": (203, 122),
    "timer_create": (222, 107),
    "timerfd_create": (283, 85),
    "mq_notify": (244, 184),
}
OWN_PROCESS_ONLY = {"kill": (62, 129), "tgkill": (234, 131)}

SIGNAL_CALLS = {
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
}

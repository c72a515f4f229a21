"""Between the judge and the keeper of a candidate: a process that no candidate can outlive.

It is outside: it makes the namespaces and mounts, passes on what is printed up to a limit, and ends when the keeper has
ended and nothing is left of what that kept.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from pathlib import Path
from typing import NoReturn

from kcap.bench.sandbox import confinement, keeper, libc, memory_group, namespaces, privileges, process_tree
from kcap.bench.sandbox.confinement import close_others
from kcap.bench.sandbox.memory_group import MemoryGroup
from kcap.bench.sandbox.spec import SandboxSetup

SCRATCH_CHECK_S = 0.5


def supervise(setup: SandboxSetup) -> NoReturn:
    """Keep one sandbox until it has ended; for a process that was forked for this."""
    try:
        _supervise(setup)
    except BaseException as error:
        with contextlib.suppress(OSError):
            confinement.send_report(setup.report, {"error": f"{type(error).__name__}: {error}"})
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(0)


def _supervise(setup: SandboxSetup) -> None:
    _own_session(setup.asker)
    handed = (*setup.spec.keep, *(() if setup.spec.control is None else (setup.spec.control,)))
    close_others((setup.log, setup.report, setup.ended, *handed, *(setup.spaces or ())))
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    setup.features.attempt(privileges.DIES_FIRST, privileges.die_first)
    group = _open_group(setup)
    user = _prepare(setup)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        if group is not None:
            group.enter()
            group.close()
        keeper.keep(setup, writing, proc, user)
    for descriptor in (writing, proc, setup.report, *handed):
        os.close(descriptor)
    _watch(setup, child, reading)
    if group is not None:
        group.remove()


def _open_group(setup: SandboxSetup) -> MemoryGroup | None:
    memory, made = setup.spec.memory, list[MemoryGroup]()
    if memory is not None:
        setup.features.attempt(memory_group.NAME, lambda: made.append(memory_group.open_group(memory)))
    return made[0] if made else None


def _own_session(asker: int) -> None:
    """Leave the judge's session, and die with who asked."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.setsid()
    libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != asker:
        os._exit(1)
    libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)


def _prepare(setup: SandboxSetup) -> int | None:
    """Namespaces and mounts; the user that the candidate is to be, None for the judge's own."""
    spec, features = setup.spec, setup.features
    users: list[int] = []
    if not features.attempt(privileges.OWN_USER, lambda: users.append(privileges.user_for(spec.folder))):
        user = None
    else:
        features.held.remove(privileges.OWN_USER)  # it holds once the candidate is that user
        (user,) = users
    namespaces.enter_namespaces(features, setup.spaces)
    owner = os.geteuid() if user is None else user
    if setup.spaces is not None:
        features.held.extend(setup.inherited)
    elif features.holds(namespaces.MOUNT_NAMESPACE):
        needed = privileges.needed_folders()
        namespaces.set_up_mounts(spec.folder, spec.hidden, needed, spec.disk, owner, features)
    if not features.holds(namespaces.SCRATCH_MOUNT) and spec.folder.stat().st_uid != owner:
        with contextlib.suppress(PermissionError):  # a plain user writes where it is let
            os.chown(spec.folder, owner, -1)
    return user


def _watch(setup: SandboxSetup, child: int, reading: int) -> None:
    """Pass on what is printed until `child`, the keeper, has ended; then end the rest, and empty the pipe."""
    limited = setup.features.holds(namespaces.SCRATCH_MOUNT)
    with PrintedOutput(reading, setup.log, setup.spec.printed) as output:
        note = ""
        while (status := _reaped(child)) is None:
            output.wait(None if limited else SCRATCH_CHECK_S)
            if output.asked_to_end or note:
                os.kill(child, signal.SIGKILL)
            elif not limited:
                note = _disk_excess(setup.spec.folder, setup.spec.disk)
        if note:
            os.write(setup.ended, f"{status} {note}\n".encode())
        process_tree.kill_descendants()
        output.drain()


def _reaped(child: int) -> int | None:
    """The wait status of `child` if it has ended; orphans that came here are reaped on the way."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return ended[1]
    return None


def _disk_excess(folder: Path, disk: int) -> str:
    """Which limit what lies below `folder` is over; what is open and has no name is not seen."""
    size = files = 0
    for parent, folders, names in os.walk(folder):
        files += len(names) + len(folders)
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_blocks * 512
        if size > disk or files > namespaces.SCRATCH_INODES:
            return (
                f"wrote more than {disk} bytes" if size > disk else f"made more than {namespaces.SCRATCH_INODES} files"
            )
    return ""


CHUNK = 1 << 16


class PrintedOutput:
    """A pipe read in the supervisor, which meanwhile hears of its children's ends and of the request to end."""

    def __init__(self, reading: int, log: int, limit: int) -> None:
        self.reading = reading
        self.log = log
        self.left = limit
        self.asked_to_end = False
        self._open = True
        os.set_blocking(reading, False)
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> PrintedOutput:
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for descriptor in (self.reading, self._woken, self._wake):
            os.close(descriptor)

    def wait(self, timeout: float | None) -> None:
        """Until something was printed, a child ended, the end was asked for, or `timeout` seconds have passed."""
        ready, _, _ = select.select([self._woken, *([self.reading] if self._open else [])], [], [], timeout)
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, CHUNK)
        if self.reading in ready:
            self._pass_on()

    def drain(self) -> None:
        """All that is in the pipe by now."""
        while self._pass_on():
            pass

    def _pass_on(self) -> bool:
        """Whether there was anything."""
        try:
            part = os.read(self.reading, CHUNK)
        except BlockingIOError:
            return False
        self._open = bool(part)
        kept, self.left = part[: self.left], max(self.left - len(part), 0)
        with contextlib.suppress(OSError):
            os.write(self.log, kept)
        return self._open

    def _end(self, *_: object) -> None:
        self.asked_to_end = True

"""Between the judge and the candidate: one process, or two with a pid namespace, that no candidate can outlive.

The keeper is outside: it makes the namespaces and mounts, passes on what is printed up to a limit, and ends when the
candidate has ended and nothing is left of it. In a pid namespace its child is process 1 there: it only forks the
candidate and reaps, and the kernel kills all the others when it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from kcap.bench.integrity.cage import calls, inside, limits, mounts, namespaces, privileges, tree
from kcap.bench.integrity.cage.descriptors import close_others
from kcap.bench.integrity.cage.output import Output
from kcap.bench.integrity.cage.plan import Plan

SCRATCH_CHECK_S = 0.5


def run(plan: Plan) -> NoReturn:
    """Keep one cage until it has ended; for a process that was forked for this."""
    try:
        _keep(plan)
    except BaseException as error:
        with contextlib.suppress(OSError):
            inside.tell(plan.told, {"error": f"{type(error).__name__}: {error}"})
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(0)


def _keep(plan: Plan) -> None:
    _own_session(plan.asker)
    close_others((plan.log, plan.told, plan.ended, *plan.cage.keep, *(plan.spaces or ())))
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    plan.pieces.attempt(limits.DIES_FIRST, limits.die_first)
    user = _prepare(plan)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        if plan.pieces.holds(namespaces.PIDS):
            _first_process(plan, writing, proc, user)
        inside.run(plan, writing, proc, user)
    for descriptor in (writing, proc, plan.told, *plan.cage.keep):
        os.close(descriptor)
    _watch(plan, child, reading)


def _own_session(asker: int) -> None:
    """Leave the judge's session, and die with who asked."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.setsid()
    calls.prctl(calls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != asker:
        os._exit(1)
    calls.prctl(calls.PR_SET_CHILD_SUBREAPER, 1)


def _prepare(plan: Plan) -> int | None:
    """Namespaces and mounts; the user that the candidate is to be, None for the judge's own."""
    cage, pieces = plan.cage, plan.pieces
    users: list[int] = []
    if not pieces.attempt(privileges.USER, lambda: users.append(privileges.user_for(cage.folder))):
        user = None
    else:
        pieces.held.remove(privileges.USER)  # it holds once the candidate is that user
        (user,) = users
    namespaces.enter(pieces, plan.spaces)
    owner = os.geteuid() if user is None else user
    if plan.spaces is not None:
        pieces.held.extend(plan.inherited)
    elif pieces.holds(namespaces.MOUNTS):
        mounts.lay(cage.folder, cage.hidden, cage.disk, owner, pieces)
    if not pieces.holds(mounts.SCRATCH) and cage.folder.stat().st_uid != owner:
        with contextlib.suppress(PermissionError):  # a plain user writes where it is let
            os.chown(cage.folder, owner, -1)
    return user


def _first_process(plan: Plan, output: int, proc: int, user: int | None) -> NoReturn:
    """Process 1 of the pid namespace: signals from within do nothing to it, and its memory is out of reach."""
    calls.prctl(calls.PR_SET_PDEATHSIG, signal.SIGKILL)
    calls.prctl(calls.PR_SET_DUMPABLE, 0)
    child = os.fork()
    if child == 0:
        inside.run(plan, output, proc, user)
    for descriptor in (output, proc, plan.told, *plan.cage.keep):
        os.close(descriptor)
    while True:
        pid, status = os.wait()
        if pid == child:
            _tell_end(plan, status)
            os._exit(0)


def _watch(plan: Plan, child: int, reading: int) -> None:
    """Pass on what is printed until `child` has ended; then end the rest, and pass on what is still in the pipe."""
    untold = not plan.pieces.holds(namespaces.PIDS)  # else process 1 tells the end
    limited = plan.pieces.holds(mounts.SCRATCH)
    with Output(reading, plan.log, plan.cage.printed) as output:
        note = ""
        while (status := _reaped(child)) is None:
            output.wait(None if limited else SCRATCH_CHECK_S)
            if output.asked_to_end or note:
                os.kill(child, signal.SIGKILL)
            elif not limited:
                note = _too_much(plan.cage.folder, plan.cage.disk)
        if note or (untold and not output.asked_to_end):
            _tell_end(plan, status, note)
        tree.clear()
        output.drain()


def _tell_end(plan: Plan, status: int, note: str = "") -> None:
    os.write(plan.ended, f"{status} {note}\n".encode())


def _reaped(child: int) -> int | None:
    """The wait status of `child` if it has ended; orphans that came here are reaped on the way."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return ended[1]
    return None


def _too_much(folder: Path, disk: int) -> str:
    """Which limit what lies below `folder` is over; what is open and has no name is not seen."""
    size = files = 0
    for place, folders, names in os.walk(folder):
        files += len(names) + len(folders)
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_blocks * 512
        if size > disk or files > mounts.FILES:
            return f"wrote more than {disk} bytes" if size > disk else f"made more than {mounts.FILES} files"
    return ""

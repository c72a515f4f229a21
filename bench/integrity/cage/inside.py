"""The candidate's side: what it gives up before the first foreign line runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import traceback
from typing import NoReturn

import orjson

from kcap.bench.integrity.cage import calls, landlock, limits, mounts, namespaces, own_proc, privileges, seccomp
from kcap.bench.integrity.cage.descriptors import close_others, redirect
from kcap.bench.integrity.cage.plan import Plan


def run(plan: Plan, output: int, proc: int, user: int | None) -> NoReturn:
    """Confine this process, tell what holds, run the body, and end. `proc` is the judge's /proc, opened."""
    code = 1
    try:
        pid = _pid(proc)
        os.setsid()
        redirect(output)
        close_others((*plan.cage.keep, plan.told))
        _confine(plan, user)
        tell(plan.told, {"pid": pid, "held": plan.pieces.held, "refused": plan.pieces.refused})
        os.close(plan.told)
        code = _result(plan)
    except BaseException as error:
        with contextlib.suppress(OSError):
            tell(plan.told, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def tell(descriptor: int, what: dict[str, object]) -> None:
    os.write(descriptor, orjson.dumps(what) + b"\n")


def _pid(proc: int) -> int:
    """This process's number where the judge is."""
    try:
        return int(os.readlink("self", dir_fd=proc))
    except OSError:
        return os.getpid()


def _confine(plan: Plan, user: int | None) -> None:
    cage, pieces = plan.cage, plan.pieces
    who = os.geteuid() if user is None else user
    own_proc.lay(pieces, who)
    os.chdir(cage.folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(cage.folder)  # tempfile remembers the judge's
    os.nice(1)
    pieces.attempt(limits.LIMITS, lambda: limits.limit(cage.memory, cage.disk))
    pieces.attempt(limits.PROCESSES, lambda: limits.limit_processes(cage.processes, who))
    privileges.become(user, [*privileges.needed_to_import(), cage.folder], pieces)
    calls.prctl(calls.PR_SET_DUMPABLE, 1)  # as any process is: it may look at itself
    calls.prctl(calls.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which takes it back
    _lock_files(plan)
    _filter_calls(plan)


def _lock_files(plan: Plan) -> None:
    cage, pieces = plan.cage, plan.pieces
    if landlock.NAME in pieces.without:
        pieces.refused[landlock.NAME] = "switched off"
        return
    hidden = () if pieces.holds(mounts.HIDDEN) or mounts.HIDDEN in pieces.without else cage.hidden
    shared = [mounts.SHARED_FOLDER] if pieces.holds(mounts.SHARED) else []
    scopes, proc = landlock.SIGNALS not in pieces.without, own_proc.folder(pieces)
    if not pieces.attempt(landlock.NAME, lambda: landlock.restrict([cage.folder, *shared], hidden, scopes, proc)):
        return
    pieces.attempt(landlock.SIGNALS, landlock.signals_are_held)
    if hidden:
        pieces.refused.pop(mounts.HIDDEN, None)
        pieces.held.append(mounts.HIDDEN)


def _filter_calls(plan: Plan) -> None:
    pieces = plan.pieces
    network = not pieces.holds(namespaces.NETWORK)
    limited = not pieces.holds(namespaces.PIDS, privileges.USER)
    signals = limited and not pieces.holds(landlock.SIGNALS)
    pieces.attempt(seccomp.NAME, lambda: seccomp.restrict(network, signals, limited))


def _result(plan: Plan) -> int:
    """Run the body as a program: its exit code, its traceback on stderr."""
    code = 0
    try:
        plan.body()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return code

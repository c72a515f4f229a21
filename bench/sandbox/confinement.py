"""The candidate's side: what it gives up, and which files it inherits, before the first foreign line runs."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable
from typing import NoReturn, TextIO

import orjson

from kcap.bench.sandbox import landlock, libc, namespaces, privileges, seccomp
from kcap.bench.sandbox.spec import SandboxSetup


def run_confined(setup: SandboxSetup, output: int, proc: int, user: int | None) -> NoReturn:
    """Confine this process, tell what holds, run the body, and end. `proc` is the judge's /proc, opened."""
    code = 1
    try:
        pid = _outer_pid(proc)
        os.setsid()
        redirect_output(output)
        close_others((*setup.spec.keep, setup.report))
        _confine(setup, user)
        send_report(setup.report, {"pid": pid, "held": setup.features.held, "refused": setup.features.refused})
        os.close(setup.report)
        code = _run_body(setup)
    except BaseException as error:
        with contextlib.suppress(OSError):
            send_report(setup.report, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def send_report(descriptor: int, what: dict[str, object]) -> None:
    os.write(descriptor, orjson.dumps(what) + b"\n")


def _outer_pid(proc: int) -> int:
    """This process's number where the judge is."""
    try:
        return int(os.readlink("self", dir_fd=proc))
    except OSError:
        return os.getpid()


def _confine(setup: SandboxSetup, user: int | None) -> None:
    spec, features = setup.spec, setup.features
    who = os.geteuid() if user is None else user
    namespaces.mount_own_proc(features, who)
    os.chdir(spec.folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(spec.folder)  # tempfile remembers the judge's
    os.nice(1)
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    features.attempt(privileges.RESOURCE_LIMITS, lambda: privileges.limit_resources(spec.memory, spec.disk))
    features.attempt(privileges.PROCESS_LIMIT, lambda: privileges.limit_processes(spec.processes, who))
    privileges.drop_privileges(user, [*privileges.needed_folders(), spec.folder], features)
    libc.prctl(libc.PR_SET_DUMPABLE, 1)  # as any process is: it may look at itself
    libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which takes it back
    _lock_files(setup)
    _filter_calls(setup)


def _lock_files(setup: SandboxSetup) -> None:
    spec, features = setup.spec, setup.features
    if landlock.NAME in features.without:
        features.refused[landlock.NAME] = "switched off"
        return
    hidden = (
        ()
        if features.holds(namespaces.HIDDEN_FOLDERS) or namespaces.HIDDEN_FOLDERS in features.without
        else spec.hidden
    )
    shared = [namespaces.SHM_FOLDER] if features.holds(namespaces.OWN_SHM) else []
    scopes, proc = landlock.SIGNALS not in features.without, namespaces.writable_proc(features)
    if not features.attempt(landlock.NAME, lambda: landlock.restrict([spec.folder, *shared], hidden, scopes, proc)):
        return
    features.attempt(landlock.SIGNALS, landlock.check_signals)
    if hidden:
        features.refused.pop(namespaces.HIDDEN_FOLDERS, None)
        features.held.append(namespaces.HIDDEN_FOLDERS)


def _filter_calls(setup: SandboxSetup) -> None:
    features = setup.features
    network = not features.holds(namespaces.NETWORK_NAMESPACE)
    limited = not features.holds(namespaces.PID_NAMESPACE, privileges.OWN_USER)
    signals = limited and not features.holds(landlock.SIGNALS)
    features.attempt(seccomp.NAME, lambda: seccomp.restrict(network, signals, limited, setup.spec.memory is not None))


def _run_body(setup: SandboxSetup) -> int:
    """Run the body as a program: its exit code, its traceback on stderr."""
    code = 0
    try:
        setup.body()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return code


MOST_DESCRIPTORS = 1 << 20  # descriptors that a kernel gives one process, unless its fs.nr_open was raised


def close_others(kept: Iterable[int]) -> None:
    """Close every descriptor above 2 that is not in `kept`."""
    start = 3
    for descriptor in sorted({each for each in kept if each > 2}):
        os.closerange(start, descriptor)
        start = descriptor + 1
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # the other limit may have been lowered below what is open
    os.closerange(start, min(hard, MOST_DESCRIPTORS) if hard != resource.RLIM_INFINITY else MOST_DESCRIPTORS)


def redirect_output(output: int) -> None:
    """Read nothing, and print to `output`: for this process, for Python's own files, and for its children."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = _text(1), _text(2)


def _text(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)

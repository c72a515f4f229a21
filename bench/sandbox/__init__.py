"""The sandbox: a process in which foreign code runs, and that costs nobody but itself.

What the machine has is used; what it lacks is left out and named (`SandboxedProcess.confined`, `.refused`, `probe`):
namespaces(7) for processes, mounts, network and IPC; a scratch of fixed size; landlock(7); seccomp(2); where root
judges, a user of its own; no capabilities(7); setrlimit(2); cgroups(7) for memory; prctl(2), by which nothing survives
its supervisor.

Inside, CUDA needs these, and none is refused: ioctl and mmap on /dev/nvidia*, reading /proc/driver/nvidia and /sys,
address space without a limit (`memory=None`), writing to /dev/shm, abstract Unix sockets, setting its own affinity,
memory policies, naming its threads by /proc/self/task/*/comm (where that fails cuInit gives 304; for what user 0 is
refused see namespaces). Device files must exist before (the first use of CUDA as root makes them), and CUDA's handles
for sharing memory between processes do not pass from one sandbox to another.

Read in this order: `spec` (what is asked for), `sandboxed_process` (seen from outside), `supervisor` and `keeper`
(between; the second lets a sandbox run and brings it to a standstill), then `confinement` (inside) with what it uses:
`namespaces`, `privileges`, `landlock`, `seccomp`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from kcap import version
from kcap.bench.sandbox import landlock, libc, memory_group, namespaces, privileges, seccomp, supervisor
from kcap.bench.sandbox.sandboxed_process import ExitStatus, SandboxedProcess
from kcap.bench.sandbox.spec import Features, SandboxSetup, SandboxSpec
from kcap.errors import CallError, KcapError

__all__ = ["HOLDS", "ExitStatus", "SandboxSpec", "SandboxedProcess", "guard", "may_hide", "open_sandbox", "probe"]


def open_sandbox(
    spec: SandboxSpec,
    log: int,
    body: Callable[[], None],
    without: frozenset[str] = frozenset(),
    after: SandboxedProcess | None = None,
) -> SandboxedProcess:
    """Fork, confine the child, and run `body` in it as a program whose stdout and stderr go to descriptor `log`.

    Must be called by the only thread of a process that keeps no secret in memory, as the child has a copy. `without`
    names features to leave out. `after` is a sandbox that was ended with `keep_scratch`: the new one goes on in its
    scratch, with the same hidden folders.
    The caller becomes the parent of orphans (prctl(2), PR_SET_CHILD_SUBREAPER). KcapError if the child cannot be made.
    """
    _check(spec)
    spaces = after.spaces if after is not None else None
    inherited = tuple(name for name in namespaces.MOUNTED if after is not None and name in after.confined)
    report, report_end, ended, ended_end = _pipes()
    libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # one may be closed
        stream.flush()
    asker = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        for descriptor in (report, report_end, ended, ended_end):
            os.close(descriptor)
        raise KcapError(f"a Solution's process cannot be forked: {error.strerror}") from None
    if pid == 0:
        supervisor.supervise(
            SandboxSetup(spec, body, log, Features(without), report_end, ended_end, asker, spaces, inherited)
        )
    os.close(report_end)
    os.close(ended_end)
    return SandboxedProcess(pid, report, ended)


def _pipes() -> tuple[int, int, int, int]:
    """Two, or none: OSError."""
    first = os.pipe()
    try:
        return *first, *os.pipe()
    except OSError:
        for descriptor in first:
            os.close(descriptor)
        raise


def guard() -> None:
    """Close this process's memory to others of its user: for whoever holds what a candidate must not see.

    It makes the process's /proc folder root's, and no core file is written. See PR_SET_DUMPABLE in prctl(2).
    """
    libc.prctl(libc.PR_SET_DUMPABLE, 0)


def _check(spec: SandboxSpec) -> None:
    """Refuse to hide what the candidate itself is made of, and scratch that is not there."""
    if not spec.folder.is_absolute() or not spec.folder.is_dir():
        raise KcapError(f"{spec.folder}: the scratch must be a folder that exists, given by its absolute path")
    for hidden in spec.hidden:
        for needed in _needed_in(hidden):
            raise CallError(f"{hidden} holds {needed}, which Solutions need: pass a folder that holds no code")


def may_hide(folder: Path) -> bool:
    """Whether a candidate could do without what is in `folder`."""
    return not _needed_in(folder)


def _needed_in(folder: Path) -> list[Path]:
    every = (Path(sys.prefix), Path(sys.base_prefix), Path(version.__file__))
    return [needed for needed in every if needed.resolve().is_relative_to(folder.resolve())]


HOLDS = "holds"

FEATURES = (
    namespaces.PID_NAMESPACE,
    namespaces.MOUNT_NAMESPACE,
    *namespaces.OTHER_NAMESPACES,
    namespaces.OWN_PROC,
    *namespaces.MOUNTED,
    landlock.NAME,
    landlock.SIGNALS,
    seccomp.NAME,
    privileges.OWN_USER,
    privileges.NO_CAPABILITIES,
    privileges.NO_NEW_PRIVILEGES,
    privileges.RESOURCE_LIMITS,
    privileges.PROCESS_LIMIT,
    memory_group.NAME,
    privileges.DIES_FIRST,
)


def probe(without: frozenset[str] = frozenset()) -> dict[str, str]:
    """Each feature of the confinement: "holds", or why it does not on this machine."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as log:
        root = Path(folder).resolve()
        root.chmod(0o711)
        secret, scratch = root / "hidden", root / "scratch"
        secret.mkdir()
        scratch.mkdir()
        spec = SandboxSpec(scratch, memory=1 << 30, disk=1 << 20, processes=64, hidden=(secret,))
        try:
            with open_sandbox(spec, log.fileno(), lambda: None, without) as process:
                held, refused = process.confined, process.refused
        except (KcapError, OSError) as error:
            return dict.fromkeys(FEATURES, str(error))
        finally:
            libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 0)  # who only asks adopts nobody
    users = (namespaces.USER_NAMESPACE,) if namespaces.USER_NAMESPACE in (*held, *refused) else ()
    return {
        each: HOLDS if each in held else refused.get(each, _why_missing(each, held)) for each in (*users, *FEATURES)
    }


def _why_missing(feature: str, held: list[str]) -> str:
    if feature == privileges.NO_CAPABILITIES and privileges.ONLY_READING in held:
        return "keeps the capability to read files: the folders of Python or of its packages are closed to other users"
    return "needs a mount namespace"

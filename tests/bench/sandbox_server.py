"""A judge of the tests' own: one thread, numpy and torch imported, that opens a sandbox for each JSON line it reads.

`python sandbox_server.py [USER | light]`; each answer says how the sandbox ended, what was printed, and what is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import sandbox_bodies

from kcap.bench.sandbox import SandboxSpec, open_sandbox
from kcap.errors import KcapError

MARK = "KCAP_CAGE_TEST"
LIMITS = {"memory": 1 << 30, "disk": 16 << 20, "processes": 64}
KEPT: dict[str, Any] = {}


def marked() -> list[int]:
    """Processes other than this one that came of it."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in Path(entry.path, "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def held_here(folder: str) -> list[Any]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    others = tempfile.gettempdir() + "/"  # where a test that runs beside this one may mount something
    own = [place for place in mounts if place.startswith(folder) or not place.startswith(others)]
    return [len(os.listdir("/proc/self/fd")), children, len(own)]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    wanted = {**LIMITS, **request.get("sandbox", {})}
    before = held_here(wanted["folder"])
    sandbox = SandboxSpec(
        **{**wanted, "folder": Path(wanted["folder"]), "hidden": tuple(map(Path, wanted.get("hidden", ())))}
    )
    body = getattr(sandbox_bodies, request["body"])
    with tempfile.TemporaryFile() as log:
        start = time.monotonic()
        without = frozenset(request.get("without", ()))
        kept = KEPT.pop("sandbox", None)
        process = open_sandbox(sandbox, log.fileno(), lambda: body(*request.get("args", ())), without, kept)
        if kept is not None:
            kept.end()
        how = process.poll()
        while how is None and time.monotonic() - start < request.get("seconds", 30):
            time.sleep(0.005)
            how = process.poll()
        late = how is None
        ended = process.end(keep_scratch=request.get("keep", False))
        took = time.monotonic() - start
        if request.get("keep"):
            KEPT["sandbox"] = process
        log.seek(0)
        printed = log.read(1 << 22).decode(errors="replace")
    left = {"processes": marked(), "before": before, "after": held_here(wanted["folder"])}
    said = {"held": process.confined, "refused": process.refused, "pid": process.pid}
    return {**said, "ended": str(ended), "late": late, "log": printed, "seconds": took, **left}


def become(user: int) -> None:
    """Another user, who may read what root may, so that Python itself is found."""
    reading = 1 << 2
    libc = ctypes.CDLL(None)
    libc.prctl(8, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    from kcap.bench.sandbox import libc as calls

    calls.capset(reading, reading, reading)
    calls.prctl(calls.PR_CAP_AMBIENT, 2, 2)
    calls.prctl(calls.PR_SET_DUMPABLE, 1)


def main() -> None:
    if sys.argv[1:] not in ([], ["light"]):
        become(int(sys.argv[1]))
    elif not sys.argv[1:]:
        import numpy  # noqa: F401
        import torch  # noqa: F401
    tempfile.gettempdir()  # remembered before the fork, as any library may have it done
    for line in sys.stdin:
        try:
            said = answer(json.loads(line))
        except KcapError as error:
            said = {"error": str(error)}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()

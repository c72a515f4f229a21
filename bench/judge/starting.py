"""Candidates are started: forked, and the code that they run is built."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from pathlib import Path
from typing import Any

import orjson

from kcap.bench.judge.candidate import Candidate
from kcap.bench.judge.candidate_process import Order
from kcap.bench.judge.failures import Ended, NotBuilt, TooSlow
from kcap.bench.judge.forking import ForkServer
from kcap.bench.judge.limits import Limits
from kcap.bench.judge.process import remove
from kcap.schemas.definition import Definition
from kcap.schemas.solution import Solution


def start(
    server: ForkServer,
    limits: Limits,
    code: Solution | Definition,
    after: Candidate | None = None,
    graphs: bool = True,
) -> Candidate:
    """Fork a process and build `code` in it; NotBuilt, Ended or TooSlow where that comes to nothing.

    `after`: an earlier process of the same code that has ended, whose build serves again. OSError or KcapError where
    the machine lacks what it takes. Whatever is raised, nothing is left open.
    """
    one = _forked(server, limits, code, after)
    one.graphs = graphs
    one.destination = isinstance(code, Solution) and code.spec.destination_passing_style
    try:
        _await_build(one)
    except BaseException:
        one.end()
        raise
    return one


def _forked(server: ForkServer, limits: Limits, code: Solution | Definition, after: Candidate | None) -> Candidate:
    with contextlib.ExitStack() as undo:
        if after is None:
            folder = Path(tempfile.mkdtemp(prefix="candidate-", dir=limits.scratch))
            undo.callback(remove, folder)
        else:
            folder = after.folder
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        undo.enter_context(ours)
        with theirs:
            log = undo.enter_context(tempfile.TemporaryFile(dir=limits.scratch))
            request = {"cage": _cage(folder, limits), "after": after.pid if after else None}
            started = _ask(server, limits, request, _order(folder, limits, code), [theirs.fileno(), log.fileno()])
        undo.pop_all()
    return Candidate(server, limits, started["pid"], ours, folder, log, started["confined"])


def _ask(
    server: ForkServer, limits: Limits, request: dict[str, Any], order: Order, descriptors: list[int]
) -> dict[str, Any]:
    """`order` may be longer than a message, and goes in a file."""
    with tempfile.TemporaryFile(dir=limits.scratch) as written:
        written.write(orjson.dumps(order.to_json()))
        written.flush()
        return server.ask(request, [*descriptors, written.fileno()])


def _order(folder: Path, limits: Limits, code: Solution | Definition) -> Order:
    text = orjson.dumps(code.model_dump(mode="json")).decode()
    kind = "solution" if isinstance(code, Solution) else "definition"
    return Order(str(folder), limits.device, limits.threads, cores=limits.cores, **{kind: text})


def _cage(folder: Path, limits: Limits) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "memory": limits.memory,
        "disk": limits.disk,
        "processes": limits.processes,
        "hidden": [str(path) for path in limits.hidden],
    }


def _await_build(one: Candidate) -> None:
    try:
        told = _told(one.receive(one.limits.build_timeout))
    except TooSlow:
        raise TooSlow(f"was not built within {one.limits.build_timeout:g} s (--build-timeout)") from None
    except Ended as ended:
        raise Ended(f"while it was built: {ended}") from None
    if "failed" in told:
        raise NotBuilt(str(told["failed"]), str(told.get("log", "")) or one.printed())


def _told(content: bytes) -> dict[str, Any]:
    """How building went, in its process's words; Ended where they are not those."""
    with contextlib.suppress(orjson.JSONDecodeError):
        if isinstance(told := orjson.loads(content), dict):
            return told
    raise Ended("it spoke to the judge itself")

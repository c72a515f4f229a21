"""Candidates are started: forked, and the code that they run is built."""

from __future__ import annotations

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

    `after`: an earlier process of the same code that has ended, whose build serves again.
    """
    folder = after.folder if after else Path(tempfile.mkdtemp(prefix="candidate-", dir=limits.scratch))
    order, cage = _order(folder, limits, code), _cage(folder, limits)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log = tempfile.TemporaryFile(dir=limits.scratch)  # noqa: SIM115 closed in end()
    with theirs, tempfile.TemporaryFile(dir=limits.scratch) as written:
        written.write(orjson.dumps(order.to_json()))
        written.flush()
        request = {"cage": cage, "after": after.pid if after else None}
        started = server.ask(request, [theirs.fileno(), log.fileno(), written.fileno()])
    one = Candidate(server, limits, started["pid"], ours, folder, log, started["confined"])
    one.graphs = graphs
    one.destination = isinstance(code, Solution) and code.spec.destination_passing_style
    _await_build(one)
    return one


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
        told = orjson.loads(one.receive(one.limits.build_timeout))
    except orjson.JSONDecodeError:
        one.end()
        raise Ended("it spoke to the judge itself") from None
    except TooSlow:
        one.end()
        raise TooSlow(f"was not built within {one.limits.build_timeout:g} s") from None
    except Ended as ended:
        raise Ended(f"while it was built: {ended}") from None
    if "failed" in told:
        printed = one.printed()
        one.end()
        raise NotBuilt(str(told["failed"]), str(told.get("log", "")) or printed)

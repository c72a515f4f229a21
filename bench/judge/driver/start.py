"""How a candidate is started: forked from a server, and built in its process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import cast

import orjson

from kcap.bench.judge.candidate import Candidate
from kcap.bench.judge.driver import protocol
from kcap.bench.judge.driver.candidate_process import CandidateOrder
from kcap.bench.judge.input_pool import SEALS
from kcap.bench.judge.messages import BuildReport, Started, StartRequest
from kcap.bench.judge.process import ForkServer, Limits, NotBuilt, ProcessEnded, remove_folder
from kcap.errors import KcapError
from kcap.schemas.flashinfer.definition import Definition
from kcap.schemas.flashinfer.solution import Solution


def start_candidate(
    server: ForkServer,
    limits: Limits,
    code: Solution | Definition,
    after: Candidate | None = None,
    graphs: bool = True,
) -> Candidate:
    """Fork a process and build `code` in it; NotBuilt, ProcessEnded or TooSlow where that comes to nothing.

    `after`: an earlier process of the same code that has ended, whose build serves again. OSError or KcapError where
    the machine lacks what it takes. Whatever is raised, nothing is left open.
    """
    candidate = _fork(server, limits, code, after)
    candidate.graphs = graphs
    candidate.destination = isinstance(code, Solution) and code.spec.destination_passing_style
    try:
        _await_build(candidate)
    except BaseException:
        candidate.end()
        raise
    return candidate


def _fork(server: ForkServer, limits: Limits, code: Solution | Definition, after: Candidate | None) -> Candidate:
    with contextlib.ExitStack() as undo:
        if after is None:
            folder = Path(tempfile.mkdtemp(prefix="candidate-", dir=limits.scratch))
            undo.callback(remove_folder, folder)
        else:
            folder = after.folder
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control, keepers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        undo.enter_context(ours)
        undo.enter_context(control)
        memory = os.memfd_create("report", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        undo.callback(os.close, memory)
        os.ftruncate(memory, protocol.REPORT_BYTES)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
        with theirs, keepers:
            log = undo.enter_context(tempfile.TemporaryFile(dir=limits.scratch))
            request: StartRequest = {
                "sandbox": {
                    "folder": str(folder),
                    "memory": limits.memory,
                    "disk": limits.disk,
                    "processes": limits.processes,
                    "hidden": [str(path) for path in limits.hidden],
                    "cores": list(limits.cores),
                },
                "after": after.pid if after else None,
            }
            order = _order(folder, limits, code)
            given = [theirs.fileno(), memory, keepers.fileno(), log.fileno()]
            started = _ask_to_start(server, limits, request, order, given)
        undo.pop_all()
    return Candidate(server, limits, started["pid"], ours, control, memory, folder, log, started["confined"])


def _ask_to_start(
    server: ForkServer, limits: Limits, request: StartRequest, order: CandidateOrder, descriptors: list[int]
) -> Started:
    """`order` may be longer than a message, and goes in a file."""
    with tempfile.TemporaryFile(dir=limits.scratch) as written:
        written.write(orjson.dumps(order.to_json()))
        written.flush()
        return server.start(request, [*descriptors, written.fileno()])


def _order(folder: Path, limits: Limits, code: Solution | Definition) -> CandidateOrder:
    text = orjson.dumps(code.model_dump(mode="json")).decode()
    kind = "solution" if isinstance(code, Solution) else "definition"
    return CandidateOrder(str(folder), limits.device, limits.threads, **{kind: text})


def _await_build(candidate: Candidate) -> None:
    report = _read_build_report(candidate.built())
    if "failed" in report:
        raise NotBuilt(str(report["failed"]), str(report.get("log", "")) or candidate.printed())
    if "built" not in report:
        raise ProcessEnded(f"while it was built: {candidate.end(keep=True, gone=True)}")
    if candidate.limits.gpu is None:
        try:
            candidate.memory_file = os.open(f"/proc/{candidate.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise KcapError(f"a candidate's memory cannot be read: {error.strerror}") from None


def _read_build_report(content: bytes) -> BuildReport:
    """How building went, as its process says. Foreign code may have written it."""
    with contextlib.suppress(orjson.JSONDecodeError):
        if isinstance(report := orjson.loads(content), dict):
            return cast(BuildReport, report)
    return {}

"""Candidates that are not confined, forked from one process that has torch and the driver, as the judge's own are."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kcap.bench.judge.candidate import Candidate
from kcap.bench.judge.driver import protocol
from kcap.bench.judge.driver.device import Gpu
from kcap.bench.sandbox import keeper

HERE = Path(__file__).parent


class Forked:
    """`program`: a file here that calls `serve_all`. Ends with its context, and what it forked too."""

    def __init__(self, program: str, *arguments: object, gpu: Gpu | None = None, gpu_memory: Any = None) -> None:
        self.limits = SimpleNamespace(timeout=60.0, build_timeout=60.0, threads=1, gpu=gpu, gpu_memory=gpu_memory)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, HERE / program, str(theirs.fileno()), *map(str, arguments)]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)

    def start(self, what: str, destination: bool = False, graphs: bool = True) -> Candidate:
        """One that runs the function `what` of the program."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control, keepers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        report = os.memfd_create("report")
        os.ftruncate(report, protocol.REPORT_BYTES)
        with theirs, keepers:
            socket.send_fds(self.control, [what.encode()], [theirs.fileno(), keepers.fileno(), report])
        pid = int(self.control.recv(100))
        log = tempfile.TemporaryFile()  # noqa: SIM115 ends with the candidate
        server: Any = SimpleNamespace(end=lambda request: {"how": "ended"})
        one = Candidate(server, self.limits, pid, ours, control, report, Path("/nowhere"), log, [])
        one.destination, one.graphs = destination, graphs
        one.built()
        one.memory_file = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
        return one

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()
        self.process.wait(timeout=30)


def serve_all(control: int, serve: Callable[[int, int, str], object]) -> None:
    """Fork for each request on `control`: a keeper, and below it `serve` with a channel, a report and what to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=control) as asked:
        while True:
            content, descriptors, _, _ = socket.recv_fds(asked, 100, 3)
            if not content:
                return _end_all()
            if os.fork() == 0:
                _keep(asked, descriptors, content.decode(), serve)
            for descriptor in descriptors:
                os.close(descriptor)


def _keep(asked: socket.socket, descriptors: list[int], what: str, serve: Callable[[int, int, str], object]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    channel, control, report = descriptors
    if (child := os.fork()) == 0:
        asked.close()
        os.close(control)
        serve(channel, report, what)
        os._exit(0)
    os.close(channel)
    asked.send(str(child).encode())
    asked.close()
    keeper.serve(keeper.KeptProcesses(child, alone=False), control)
    os._exit(0)


def _end_all() -> None:
    """End all that this process forked: it leads their group, and nobody else has to reap them."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    os.killpg(0, signal.SIGCONT)  # candidates stand still
    with contextlib.suppress(ChildProcessError):
        os.wait()  # for all of them, as SIGCHLD is ignored

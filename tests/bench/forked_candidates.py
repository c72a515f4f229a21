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
from kcap.bench.judge.driver.device import Gpu

HERE = Path(__file__).parent


class Forked:
    """`program`: a file here that calls `serve_all`. Ends with its context, and what it forked too."""

    def __init__(self, program: str, *arguments: object, gpu: Gpu | None = None) -> None:
        self.limits = SimpleNamespace(timeout=60.0, threads=1, gpu=gpu)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, HERE / program, str(theirs.fileno()), *map(str, arguments)]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)

    def start(self, what: str, destination: bool = False, graphs: bool = True) -> Candidate:
        """One that runs the function `what` of the program."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self.control, [what.encode()], [theirs.fileno()])
        pid = int(self.control.recv(100))
        log = tempfile.TemporaryFile()  # noqa: SIM115 ends with the candidate
        server: Any = SimpleNamespace(end=lambda request: {"how": "ended"})
        one = Candidate(server, self.limits, pid, ours, Path("/nowhere"), log, [])
        one.destination, one.graphs = destination, graphs
        return one

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()
        self.process.wait(timeout=30)


def serve_all(control: int, serve: Callable[[int, str], object]) -> None:
    """Fork for each request on `control`, and call `serve` there with its channel and what it is to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=control) as asked:
        while True:
            content, (*channels,), _, _ = socket.recv_fds(asked, 100, 1)
            if not content:
                return _end_all()
            if (pid := os.fork()) == 0:
                asked.close()
                serve(channels[0], content.decode())
                os._exit(0)
            os.close(channels[0])
            asked.send(str(pid).encode())


def _end_all() -> None:
    """End all that this process forked: it leads their group, and nobody else has to reap them."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(ChildProcessError):
        os.wait()  # for all of them, as SIGCHLD is ignored

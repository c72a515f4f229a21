"""A sandboxed process from outside: opened, watched and ended by the process that forked it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import orjson

from kcap.bench.sandbox import namespaces, process_tree
from kcap.errors import KcapError

START_S = 60.0  # forking, and some twenty system calls
GRACE_S = 5.0  # for the kernel to free what a killed candidate had


@dataclass(frozen=True)
class ExitStatus:
    """How a candidate ended: by itself with an exit code, by a signal, or neither: from outside."""

    code: int | None = None
    signal: int | None = None
    note: str = ""

    def __str__(self) -> str:
        if self.code is not None:
            return f"exit code {self.code}"
        if self.signal is None:
            return "ended by the judge"
        name = signal.Signals(self.signal).name if self.signal in {*signal.Signals} else f"signal {self.signal}"
        return f"{name} ({self.note})" if self.note else name


class SandboxedProcess:
    """One confined process. Also a context manager, and something to select(2) on: readable at its end."""

    def __init__(self, supervisor: int, report_pipe: int, ended: int) -> None:
        """Wait until the candidate is confined; KcapError where it cannot be started."""
        self._supervisor = supervisor
        self._ended_pipe = ended
        self._spaces: tuple[int, int] | None = None
        self.how: ExitStatus | None = None
        try:
            report = _read_report(report_pipe)
        except KcapError:
            self.end()
            raise
        self.pid: int = report["pid"]  # the candidate, as numbered here
        self.confined: list[str] = report["held"]
        self.refused: dict[str, str] = report["refused"]
        if namespaces.MOUNT_NAMESPACE in self.confined:
            with contextlib.suppress(OSError):
                self._spaces = namespaces.open_namespaces(supervisor)

    def __enter__(self) -> SandboxedProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def fileno(self) -> int:
        return self._ended_pipe

    @property
    def spaces(self) -> tuple[int, int] | None:
        """The namespaces (user, mount) that hold its scratch, until `end`."""
        return self._spaces

    def poll(self) -> ExitStatus | None:
        """How it ended, None while it runs; by then nothing that it started is left."""
        if self.how is None and self._reaped():
            self._close()
        return self.how

    def end(self, keep_scratch: bool = False) -> ExitStatus:
        """Kill it and all that it started, and say how it ended; again and again gives the same answer.

        `keep_scratch` lets the content of its scratch live until the next `end`, for a sandbox that is opened `after`.
        """
        if self.how is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._supervisor, signal.SIGCONT)
                os.kill(self._supervisor, signal.SIGTERM)
            if not self._gone(GRACE_S):
                process_tree.kill_all(lambda: process_tree.descendants(self._supervisor))
                process_tree.kill_all(lambda: [] if self._reaped() else [self._supervisor])
            self._close()
        if not keep_scratch:
            self._forget()
        assert self.how is not None
        return self.how

    def _gone(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._reaped():
                return True
            time.sleep(0.001)
        return False

    def _reaped(self) -> bool:
        """Whether the supervisor is gone, reaped here or by whoever waits for any child."""
        try:
            return bool(os.waitpid(self._supervisor, os.WNOHANG)[0])
        except ChildProcessError:
            return True

    def _close(self) -> None:
        _end_strays()
        os.set_blocking(self._ended_pipe, False)
        with contextlib.suppress(BlockingIOError):
            self.how = _exit_status(os.read(self._ended_pipe, 4096))
        self.how = self.how or ExitStatus()
        os.close(self._ended_pipe)

    def _forget(self) -> None:
        for descriptor in self._spaces or ():
            os.close(descriptor)
        self._spaces = None


def _read_report(descriptor: int) -> dict[str, Any]:
    """What the candidate said of its confinement; KcapError where it said why it has none, or nothing."""
    deadline, line = time.monotonic() + START_S, b""
    with open(descriptor, "rb", buffering=0) as pipe:
        while not line.endswith(b"\n") and select.select([pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
            if not (part := pipe.read(1 << 16)):
                break
            line += part
    report: dict[str, Any] = orjson.loads(line) if line.endswith(b"\n") else {"error": "no answer"}
    if "error" in report:
        raise KcapError(f"a Solution's process cannot be confined: {report['error']}")
    return report


def _exit_status(line: bytes) -> ExitStatus:
    """What process 1 or the supervisor wrote of the candidate's end; nothing, where that was killed from outside."""
    status, _, note = line.decode().strip().partition(" ")
    if not status:
        return ExitStatus()
    number = int(status)
    if os.WIFSIGNALED(number):
        return ExitStatus(signal=os.WTERMSIG(number), note=note)
    return ExitStatus(code=os.WEXITSTATUS(number), note=note)


def _end_strays() -> None:
    """End what is left of a candidate that killed its own supervisor: its orphans come to this process."""
    if not process_tree.confined(os.getpid()):
        process_tree.kill_all(_strays)


def _strays() -> list[int]:
    orphans = [pid for pid in process_tree.children(os.getpid()) if process_tree.confined(pid)]
    return [each for pid in orphans for each in (pid, *process_tree.descendants(pid))]

"""A worker process and its parent, which speak in JSON lines.

The worker is started, fed, given a time limit for each request, and restarted after a crash.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import orjson

from kcap.errors import CallError, KcapError

START_LIMIT_S = 600.0  # importing torch and an engine's library from a cold disk


class Died(Exception):
    """The worker ended or was too slow; the message says how."""


class Worker:
    """One child process at a time, running `module`; `environment` is what it says of its device.

    `option`: what sets the time limits of its requests, if the user does.
    """

    def __init__(
        self, session: Mapping[str, Any], module: str = "kcap.replay.worker", option: str | None = "--timeout"
    ) -> None:
        self.session = session
        self.module = module
        self.option = option
        self.environment: dict[str, Any] = {}
        self.restarts = -1
        self.process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 closed in __exit__

    def __enter__(self) -> Worker:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._log.close()

    def run(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """The worker's answer to one request; a crash or a timeout is an answer too."""
        if self.process is None or self.process.poll() is not None:
            self._end()
            self._start()
        try:
            self._send(request)
            answer = self._receive(timeout)
            if answer.pop("poisoned", False):
                self._end()
            return answer
        except TimeoutError:
            self._end()
            told = f" ({self.option})" if self.option else ""
            return {"status": "skipped", "reason": f"took longer than {timeout:g} s{told}"}
        except Died as death:
            self._end()
            return {"status": "failed", "reason": f"crashed: {death}"}

    def _start(self) -> None:
        self._buffer = b""
        if importlib.util.find_spec("torch") is None:  # every worker needs it
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        command = [sys.executable, "-P", "-m", self.module]  # -P: nothing is imported from the working directory
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log, start_new_session=True)
        self.restarts += 1
        try:
            self._send(self.session)
            self.environment = self._receive(START_LIMIT_S)
            if "error" in self.environment:
                raise CallError(self.environment["error"])
            self._receive(START_LIMIT_S)
        except (Died, TimeoutError) as death:
            raise KcapError(f"{self.module} does not start: {death or 'no answer'}") from None

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(orjson.dumps(message) + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Died(self._epitaph()) from None

    def _receive(self, timeout: float) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            if not (part := os.read(self.process.stdout.fileno(), 1 << 20)):
                raise Died(self._epitaph())
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = orjson.loads(line)
        return answer

    def _epitaph(self) -> str:
        """How the worker died: its signal, or the last line that it wrote."""
        assert self.process is not None
        code = self.process.wait()
        if code < 0:
            return signal_name(-code)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"exit code {code}: {lines[-1][:200] if lines else 'no message'}"

    def _end(self) -> None:
        """Close the pipes; a worker that does not end by itself is killed, and so is what it leaves behind."""
        if self.process is None:
            return
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None


def signal_name(number: int) -> str:
    """The signal that ended a process, and what a kill may mean."""
    name = signal.Signals(number).name
    return f"{name} (killed, perhaps out of memory)" if name == "SIGKILL" else name


def serve(answers: BinaryIO, handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer each line on standard input until it ends, or the CUDA context is lost: then a new process is needed."""
    import torch

    send(answers, {"ready": True})
    for line in sys.stdin.buffer:
        with torch.inference_mode():
            answer = handle(orjson.loads(line))
        send(answers, answer)
        if answer.get("poisoned"):
            return


def send(answers: BinaryIO, message: dict[str, Any]) -> None:
    answers.write(orjson.dumps(message) + b"\n")

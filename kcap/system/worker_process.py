"""Both ends of the JSON-lines protocol between kcap and its worker processes.

The parent sends a session; the worker answers with its environment and, when it is set up, that it is ready. Then each
request gets one answer. The parent limits the time of a request and restarts a worker that crashed. Only the worker's
end (`serve`) imports torch.
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
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, TypedDict, cast

import orjson

from kcap.errors import CallError, KcapError
from kcap.system.native_build import cache_folder

CRASHED = "crashed: "  # how the reason of a request begins whose worker died
START_LIMIT_S = 600.0  # importing torch and an engine's library from a cold disk
ORPHAN_S = 2.0  # in which a worker whose parent is gone may end by itself


def worker_environment() -> dict[str, str]:
    """This process's, with a place for what Triton compiles where that cannot be the home."""
    if os.access(os.path.expanduser("~"), os.W_OK | os.X_OK):
        return dict(os.environ)
    return {"TRITON_HOME": str(cache_folder()), **os.environ}


class Session(TypedDict, total=False):
    """The parent's first line; each module extends it. `device` None: the one that the work was recorded on."""

    device: str | None
    threads: int | None


class Environment(TypedDict, total=False):
    """The worker's first line: the device that it runs on. `error`: why there is none."""

    device: str
    device_name: str
    driver: str | None
    threads: int | None
    torch: str
    error: str


class Answer(TypedDict, total=False):
    """What every answer has; each module adds fields of its own. `poisoned`: the process can run nothing more."""

    status: str
    reason: str | None
    poisoned: bool


class Died(Exception):
    """The worker ended; the message says how."""


class Worker:
    """One child process at a time, running `module`.

    `timeout_option`: the option that sets the time limit of a request, named where one takes too long.
    """

    def __init__(self, session: Mapping[str, object], module: str, timeout_option: str | None = "--timeout") -> None:
        self.session = session
        self.module = module
        self.timeout_option = timeout_option
        self.environment = Environment()
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

    def run(self, request: Mapping[str, object], timeout: float) -> dict[str, Any]:
        """The worker's `Answer` to one request; a crash or a timeout is an answer too."""
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
            option = f" ({self.timeout_option})" if self.timeout_option else ""
            return {**Answer(status="skipped", reason=f"took longer than {timeout:g} s{option}")}
        except Died as death:
            self._end()
            return {**Answer(status="failed", reason=f"{CRASHED}{death}")}

    def kill(self) -> None:
        """Kill the process at once, from any thread; a request that it was asked is answered with its death."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def _start(self) -> None:
        self._buffer = b""
        if importlib.util.find_spec("torch") is None:  # every worker needs it
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        command = [sys.executable, "-P", "-m", self.module]  # -P: nothing is imported from the working directory
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._log, env=worker_environment(), start_new_session=True
        )
        self.restarts += 1
        try:
            self._send(self.session)
            environment = cast("Environment", self._receive(START_LIMIT_S))
            if "error" in environment:
                raise CallError(environment["error"])
            self.environment = environment
            self._receive(START_LIMIT_S)  # that it is ready
        except (Died, TimeoutError) as death:
            raise KcapError(f"{self.module} does not start: {death or 'no answer'}") from None

    def _send(self, message: Mapping[str, object]) -> None:
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(orjson.dumps(message) + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Died(self._cause_of_death()) from None

    def _receive(self, timeout: float) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            if not (chunk := os.read(self.process.stdout.fileno(), 1 << 20)):
                raise Died(self._cause_of_death())
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: dict[str, Any] = orjson.loads(line)
        return message

    def _cause_of_death(self) -> str:
        """The signal that ended the worker, or its exit code and the last line that it wrote."""
        assert self.process is not None
        code = self.process.wait()
        if code < 0:
            return signal_name(-code)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"exit code {code}: {lines[-1][:200] if lines else 'no message'}"

    def _end(self) -> None:
        """Close the pipes; kill a worker that does not end by itself, and every process that it leaves behind."""
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


def receive_session() -> tuple[BinaryIO, Any]:
    """In the worker: the pipe for its messages, and the session. From now on prints go to standard error, and the
    process ends once its parent has closed the other end, whatever it is doing: its peers may keep it waiting."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    messages = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return messages, orjson.loads(sys.stdin.buffer.readline())


def _end_with_parent() -> None:
    hung_up = select.poll()
    hung_up.register(sys.stdin, 0)  # that the other end is closed is told all the same
    hung_up.poll()
    time.sleep(ORPHAN_S)
    os._exit(1)


def serve(messages: BinaryIO, handle: Callable[[dict[str, Any]], Mapping[str, object]]) -> None:
    """In the worker: answer each request until there are no more, or the process is poisoned and has to be replaced."""
    import torch

    send(messages, {"ready": True})
    for line in sys.stdin.buffer:
        with torch.inference_mode():
            answer = handle(orjson.loads(line))
        send(messages, answer)
        if answer.get("poisoned"):
            return


def send(messages: BinaryIO, message: Mapping[str, object]) -> None:
    """In the worker: write one line."""
    messages.write(orjson.dumps(message) + b"\n")

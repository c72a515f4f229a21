"""Answer each request in a fork of this process, which has torch imported and runs no code from a dataset itself.

Whatever such code does (end its process, crash, fill the memory, change torch) costs only its own answer. This process
never opens a GPU: after that a fork could not use one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import orjson
from pydantic import ValidationError

from kcap.schemas.recording.records import Record
from kcap.system.worker_process import send, signal_name

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_ANSWER_BYTES = 1 << 26  # an answer holds every sample of the clock


@dataclass(frozen=True)
class Forks:
    """Runs functions one after another, each in a fork; none of them can write to `answers`."""

    answers: BinaryIO

    def serve(self, kind: type[Record], handle: Callable[[Any], Record]) -> None:
        """Answer each request with the `kind` that `handle` returns, or with how its fork ended."""
        send(self.answers, {"ready": True})
        for line in sys.stdin.buffer:
            content, cause = self.run(partial(_handle_line, handle, line))
            send(self.answers, checked_answer(kind, content, cause))

    def run(self, function: Callable[[], Mapping[str, object]]) -> tuple[bytes, str]:
        """The JSON of what `function` returns in a fork, and how the fork ended."""
        readable, writable = os.pipe()
        if (child := os.fork()) == 0:
            self.answers.close()
            os.close(readable)
            _run_and_exit(function, writable)
        os.close(writable)
        with os.fdopen(readable, "rb") as pipe:
            content = pipe.read(MAX_ANSWER_BYTES)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return content, f"crashed: {signal_name(-code)}" if code < 0 else f"ended its process with exit code {code}"


def _handle_line(handle: Callable[[Any], Record], line: bytes) -> dict[str, Any]:
    return handle(orjson.loads(line)).model_dump(mode="json")


def _run_and_exit(function: Callable[[], Mapping[str, object]], pipe: int) -> None:
    """In the fork: answer and exit, whatever `function` runs."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whatever session or group the code moves to
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.write(pipe, orjson.dumps(function()))
    finally:
        os._exit(0)


def checked_answer(kind: type[Record], content: bytes, cause: str) -> dict[str, Any]:
    """`content` if it is a `kind`: a reference may have written to the pipe itself, or nothing at all came."""
    try:
        return kind.model_validate_json(content).model_dump(mode="json", exclude_defaults=True)
    except ValidationError:
        return {"status": "failed", "reason": f"the reference {cause}"}

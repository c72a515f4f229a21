"""Answer each request in a fork of this process, which has torch imported and runs nothing from a file itself.

So whatever code from elsewhere does (end its process, crash, fill the memory, change torch) costs its own answer alone.
This process never asks for a GPU: a fork could not use one after that.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import orjson
from pydantic import ValidationError

from kcap.replay.rebuild.memory import limit_host_memory
from kcap.schemas.recording.records import Record
from kcap.system.worker_process import send, signal_name

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MOST_ANSWER = 1 << 26  # bytes: every sample of the clock is in it


@dataclass(frozen=True)
class Forks:
    """Runs one function after another, each in a fork; none of them can write to `answers`."""

    answers: BinaryIO

    def serve(self, kind: type[Record], make: Callable[[dict[str, Any]], Record]) -> None:
        """Answer every line on standard input with the `kind` that `make` gives for it, or with how it ended."""
        send(self.answers, {"ready": True})
        for line in sys.stdin.buffer:
            send(self.answers, checked_answer(kind, *self.run(partial(_answer, make, orjson.loads(line)))))

    def run(self, make: Callable[[], dict[str, Any]]) -> tuple[bytes, str]:
        """The JSON of what `make` gives in a fork, and how that ended."""
        readable, writable = os.pipe()
        if (child := os.fork()) == 0:
            self.answers.close()
            os.close(readable)
            _end_with(make, writable)
        os.close(writable)
        with os.fdopen(readable, "rb") as pipe:
            content = pipe.read(MOST_ANSWER)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return content, f"crashed: {signal_name(-code)}" if code < 0 else f"ended its process with exit code {code}"


def open_forks() -> tuple[Forks, dict[str, Any]]:
    """Read the session, the first line on standard input; from here on prints go to standard error."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return Forks(answers), orjson.loads(sys.stdin.buffer.readline())


def _answer(make: Callable[[dict[str, Any]], Record], request: dict[str, Any]) -> dict[str, Any]:
    return make(request).model_dump(mode="json")


def _end_with(make: Callable[[], dict[str, Any]], pipe: int) -> None:
    """In the fork: answer and end, whatever `make` runs."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whatever session or group the code moves to
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.write(pipe, orjson.dumps(make()))
    finally:
        os._exit(0)


def checked_answer(kind: type[Record], content: bytes, end: str) -> dict[str, Any]:
    """`content` where it is a `kind`: a reference may have written to the pipe, or nothing came."""
    try:
        return kind.model_validate_json(content).model_dump(mode="json", exclude_defaults=True)
    except ValidationError:
        return {"status": "failed", "reason": f"the reference {end}"}


def limit_fork_memory(device: str, memory: int | None) -> None:
    """In a fork on the CPU: `memory` bytes (None: what is free) are all that it gets."""
    if device == "cpu":
        limit_host_memory(memory)

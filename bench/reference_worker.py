"""The process that runs references: `python -m kcap.bench.reference_worker`, one JSON line in for each, one out.

It runs nothing from a file itself: a fork of it, which has torch imported already, makes the inputs, runs the reference
and tells through a pipe what came of it. The first line in is the session.
"""

from __future__ import annotations

import os
import sys
from typing import Any, BinaryIO

import orjson
import torch
from pydantic import ValidationError

from kcap.bench.reference import ReferenceResult
from kcap.bench.run_reference import run
from kcap.replay.memory import limit_host_memory
from kcap.replay.pool import signal_name
from kcap.replay.worker import send

MOST_ANSWER = 1 << 20  # bytes


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    session = orjson.loads(sys.stdin.buffer.readline())
    send(answers, {"device": session["device"]})
    send(answers, {"ready": True})
    for line in sys.stdin.buffer:
        send(answers, in_fork(session, orjson.loads(line), answers))


def in_fork(session: dict[str, Any], request: dict[str, Any], answers: BinaryIO) -> dict[str, Any]:
    """What a fork of this process says of `request`, or how it ended without a word."""
    readable, writable = os.pipe()
    if (child := os.fork()) == 0:
        answers.close()
        os.close(readable)
        answer(session, request, writable)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        content = pipe.read(MOST_ANSWER)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        return ReferenceResult.model_validate_json(content).model_dump(mode="json")
    except ValidationError:
        how = f"crashed: {signal_name(-code)}" if code < 0 else f"ended its process with exit code {code}"
        return {"status": "failed", "reason": f"the reference {how}"}


def answer(session: dict[str, Any], request: dict[str, Any], pipe: int) -> None:
    """In the fork: answer and end, whatever the reference does."""
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if session["device"] == "cpu":
            limit_host_memory(session["memory"])
        if session["threads"]:
            torch.set_num_threads(session["threads"])
        os.write(pipe, orjson.dumps(run(session, request).model_dump(mode="json")))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()

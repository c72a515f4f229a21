"""The process that replays: `python -m kcap.replay.worker`, one JSON line in for each Sample, one out.

It runs in a process of its own, so that a crash or an illegal address costs one Call. The first line in is the
session (Recording, device); the first line out says what the device is, or why there is none.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import torch

from kcap.replay import environment, libraries
from kcap.replay.memory import limit_host_memory
from kcap.replay.runner import Runner
from kcap.replay.skip import Skip
from kcap.schemas.recording import Call, Sample


def main() -> None:
    """Answer lines on standard input until it ends; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    session = orjson.loads(sys.stdin.buffer.readline())
    try:
        device = environment.choose(session["device"], session["home"])
        send(answers, environment.describe(device, session["threads"]))
    except (ValueError, RuntimeError) as error:
        send(answers, {"error": str(error).splitlines()[0]})
        return
    preload(session["namespaces"])
    if device == "cpu":
        limit_host_memory()
    root = Path(session["root"]) if session["root"] else None
    serve(Runner(device, session["home"] or "cuda", root, session.get("trust", False)), answers)


def preload(namespaces: list[str]) -> None:
    """Import libraries before the first Call's clock runs; one that is absent is told when a Call needs it."""
    for namespace in namespaces:
        try:
            libraries.load(namespace)
        except Skip:
            continue


def serve(runner: Runner, answers: BinaryIO) -> None:
    send(answers, {"ready": True})
    for line in sys.stdin.buffer:
        request = orjson.loads(line)
        sample = Sample.model_validate(request["sample"]) if request["sample"] else None
        with torch.inference_mode():
            answer = runner.run(Call.model_validate(request["call"]), sample, request["seconds"])
        send(answers, answer)
        if answer.get("poisoned"):  # the CUDA context is lost: the next Call needs a new process
            return


def send(answers: BinaryIO, message: dict[str, Any]) -> None:
    answers.write(orjson.dumps(message) + b"\n")


if __name__ == "__main__":
    main()

"""The process that replays: `python -m kcap.replay.worker`, one JSON line in for each Sample or Program, one out.

It runs in a process of its own, so that a crash or an illegal address costs one Call. The first line in is the
session (Recording, device); the first line out says what the device is, or why there is none.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from kcap.replay.calls.runner import Runner, TimingOptions
from kcap.replay.program.runner import ProgramRunner
from kcap.replay.rebuild import operators
from kcap.replay.rebuild.memory import limit_host_memory
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.replay.timing import device
from kcap.schemas.derive.bound_call import Skip
from kcap.schemas.recording.recording import Call, Sample
from kcap.system.worker_process import send, serve


@dataclass(frozen=True)
class Session:
    """What a worker was told first: the Recording that its requests are of (None: a trace file), and the device."""

    answers: BinaryIO
    device: str
    home: str
    root: Path | None
    trust: bool
    how: TimingOptions


def main() -> None:
    """Answer requests to replay until there are no more."""
    session = open_session()
    if session is None:
        return
    rebuilder = Rebuilder(session.device, session.home, session.root, session.trust)
    runner, programs = Runner(rebuilder, session.how), ProgramRunner(rebuilder)

    def replay(request: dict[str, Any]) -> dict[str, Any]:
        if "program" in request:
            return programs.run(request["program"], request["seconds"])
        return runner.run(Call.model_validate(request["call"]), sample_of_request(request), request["seconds"])

    serve(session.answers, replay)


def open_session() -> Session | None:
    """Read the session and say what the device is, or why there is none (None); prints go to standard error."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    given = orjson.loads(sys.stdin.buffer.readline())
    there = device_answer(given)
    send(answers, there)
    if "error" in there:
        return None
    device = str(there["device"])
    preload_libraries(given["namespaces"])
    if device == "cpu":
        limit_host_memory()
    root = Path(given["root"]) if given["root"] else None
    return Session(answers, device, given["home"] or "cuda", root, given.get("trust", False), TimingOptions.of(given))


def device_answer(given: dict[str, Any]) -> dict[str, str | int | None]:
    """What a measurement says of the session's device; under `error`, why there is none."""
    try:
        return device.machine_fields(device.choose_device(given["device"], given["home"]), given["threads"])
    except (ValueError, RuntimeError) as error:
        return {"error": str(error).splitlines()[0]}


def preload_libraries(namespaces: list[str]) -> None:
    """Import libraries before the first Call's clock runs; one that is absent is told when a Call needs it."""
    for namespace in namespaces:
        try:
            operators.load_library(namespace)
        except Skip:
            continue


def sample_of_request(request: dict[str, Any]) -> Sample | None:
    return Sample.model_validate(request["sample"]) if request["sample"] else None


if __name__ == "__main__":
    main()

"""The process that replays: `python -m kcap.replay.worker`.

It answers a request for each Sample of a Call, or for a Program, and runs in a process of its own, so that a crash or
an illegal address costs one Call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from kcap.errors import first_line
from kcap.replay.calls.runner import Runner, TimingOptions
from kcap.replay.group.collectives import resolve_collective
from kcap.replay.group.peers import Peers
from kcap.replay.jobs import ReplaySession
from kcap.replay.program.runner import ProgramRunner
from kcap.replay.rebuild import operators
from kcap.replay.rebuild.batches import StepBatch
from kcap.replay.rebuild.memory import limit_host_memory
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.replay.timing import device
from kcap.schemas.recording.recording import Call, Sample
from kcap.system.worker_process import Environment, receive_session, send, serve


@dataclass(frozen=True)
class OpenSession:
    """The session of a worker that has a device. `root`: the Recording that its requests are of, if it is one."""

    answers: BinaryIO
    device: str
    home: str
    root: Path | None
    trust: bool
    options: TimingOptions
    peers: Peers | None = None
    dummy_weights: bool = False

    def rebuilder(self) -> Rebuilder:
        """What rebuilds the Calls of its requests."""
        collective = partial(resolve_collective, peers=self.peers) if self.peers else None
        return Rebuilder(self.device, self.home, self.root, self.trust, collective, self.dummy_weights)


def main() -> None:
    """Answer requests to replay until there are no more."""
    session = open_session()
    if session is None:
        return
    rebuilder = session.rebuilder()
    runner, programs = Runner(rebuilder, session.options, session.peers), ProgramRunner(rebuilder, session.peers)

    def replay(request: dict[str, Any]) -> dict[str, Any]:
        rebuilder.batches.meant = StepBatch.of_fields(request["batch"]) if "batch" in request else None
        if "program" in request:
            return programs.run(request["program"], request["seconds"])
        return runner.run(Call.model_validate(request["call"]), sample_of_request(request), request["seconds"])

    serve(session.answers, replay)


def open_session() -> OpenSession | None:
    """Read the session and answer with its environment; None where it has no device."""
    session: ReplaySession
    answers, session = receive_session()
    environment = open_environment(session)
    send(answers, environment)
    if "error" in environment:
        return None
    operators.preload_libraries(session["operators"])  # before the first Call's time limit runs
    if environment["device"] == "cpu":
        limit_host_memory()
    root = Path(session["root"]) if session["root"] else None
    home, trust, device = session["home"] or "cuda", session.get("trust", False), environment["device"]
    peers = Peers(session["group"], device) if "group" in session else None
    dummy = session.get("dummy_weights", False)
    return OpenSession(answers, device, home, root, trust, TimingOptions.of(session), peers, dummy)


def open_environment(session: ReplaySession) -> Environment:
    """What Measurements say of the session's device; under `error`, why there is none."""
    try:
        chosen = device.choose_device(session["device"], session["home"])
        if "group" in session:
            chosen = device.device_of_rank(chosen, session["group"]["rank"], session["group"]["size"])
        return device.machine_fields(chosen, session["threads"])
    except (ValueError, RuntimeError) as error:
        return {"error": first_line(error)}


def sample_of_request(request: dict[str, Any]) -> Sample | None:
    return Sample.model_validate(request["sample"]) if request["sample"] else None


if __name__ == "__main__":
    main()

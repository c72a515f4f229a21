"""The process that runs references, each in a fork: `python -m kcap.replay.datasets.reference_worker`."""

from __future__ import annotations

import torch

from kcap.replay.datasets.forks import Forks
from kcap.replay.datasets.reference import ReferenceRequest, ReferenceResult, ReferenceSession
from kcap.replay.datasets.run_reference import run_reference
from kcap.replay.rebuild.memory import limit_host_memory
from kcap.system.worker_process import receive_session, send


def main() -> None:
    """Answer requests until there are no more."""
    session: ReferenceSession
    answers, session = receive_session()
    send(answers, {"device": session["device"]})

    def in_fork(request: ReferenceRequest) -> ReferenceResult:
        if session["device"] == "cpu":
            limit_host_memory(session["memory"])
        if session["threads"]:
            torch.set_num_threads(session["threads"])
        return run_reference(session, request)

    Forks(answers).serve(ReferenceResult, in_fork)


if __name__ == "__main__":
    main()

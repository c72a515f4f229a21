"""The process that runs references: one JSON line in for each, one out.

`python -m kcap.replay.datasets.reference_worker`; the first line in is the session, the first out its device.
"""

from __future__ import annotations

from typing import Any

import torch

from kcap.replay.datasets.forks import limit_fork_memory, open_forks
from kcap.replay.datasets.reference import ReferenceResult
from kcap.replay.datasets.run_reference import run_reference
from kcap.system.worker_process import send


def main() -> None:
    """Answer requests until there are no more."""
    forks, session = open_forks()
    send(forks.answers, {"device": session["device"]})

    def result(request: dict[str, Any]) -> ReferenceResult:
        limit_fork_memory(session["device"], session["memory"])
        if session["threads"]:
            torch.set_num_threads(session["threads"])
        return run_reference(session, request)

    forks.serve(ReferenceResult, result)


if __name__ == "__main__":
    main()

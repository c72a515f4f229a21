"""The process that checks references: `python -m kcap.bench.check.worker`, one JSON line in for each check, one out.

A request is a CheckRequest, or a DrawRequest (which has `integers`).

The first line in is the session (Recording, device), as for kcap.replay.worker; the first out says what the device is.
"""

from __future__ import annotations

from typing import Any, cast

from kcap.bench.check.checker import Checker, CheckRequest
from kcap.bench.check.draws import DrawRequest
from kcap.errors import CallError
from kcap.replay.worker import open_session, sample_of_request
from kcap.schemas.derive.derive import derive
from kcap.schemas.recording.recording import load
from kcap.system.worker_process import serve


def main() -> None:
    """Answer requests to check until there are no more."""
    session = open_session()
    if session is None:
        return
    if session.root is None:
        raise CallError("only the Definitions of a Recording can be checked")
    derived, rebuilder = derive(load(session.root)), session.rebuilder()
    checker = Checker(derived.definitions, rebuilder, derived.refused, session.peers.rank if session.peers else 0)

    def check(message: dict[str, Any]) -> dict[str, Any]:
        sample = sample_of_request(message)
        if "integers" in message:
            return dict(checker.try_draws(cast(DrawRequest, message), sample))
        request = cast(CheckRequest, message)
        return dict(checker.check(request["definition"], request["call"], sample, request["seed"]))

    serve(session.answers, check)


if __name__ == "__main__":
    main()

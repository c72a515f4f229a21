"""The process that times references of a dataset: one JSON line in for each Workload, one out.

`python -m kcap.replay.datasets.timing_worker`; the first line in is the session, as for kcap.replay.worker, and the
first out says what the device is, or why there is none: a fork looks, so that the next ones can use a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson

from kcap.replay.datasets.forks import limit_fork_memory, open_forks
from kcap.replay.datasets.run_reference import time_reference
from kcap.replay.timing import device
from kcap.replay.worker import device_answer
from kcap.schemas.results.measurement import Measurement
from kcap.system.worker_process import send


def main() -> None:
    """Answer requests until there are no more."""
    forks, session = open_forks()
    there = orjson.loads(forks.run(partial(device_answer, session))[0])
    send(forks.answers, there)
    if "error" not in there:
        forks.serve(Measurement, partial(measured, {**session, "device": there["device"]}))


def measured(session: dict[str, Any], request: dict[str, Any]) -> Measurement:
    """In a fork: the Measurement of the request's Workload."""
    limit_fork_memory(session["device"], None)
    there = device.machine_fields(session["device"], session["threads"])
    return Measurement.model_validate({**there, **time_reference(session, request), **request["told"]})


if __name__ == "__main__":
    main()

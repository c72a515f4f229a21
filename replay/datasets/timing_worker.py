"""The process that times references of a dataset, each in a fork: `python -m kcap.replay.datasets.timing_worker`.

A fork looks for the device, too: this process never opens a GPU, so that the next forks can use it.
"""

from __future__ import annotations

from functools import partial

import orjson

from kcap.replay.datasets.forks import Forks
from kcap.replay.datasets.run_reference import time_reference
from kcap.replay.datasets.workloads import TimingRequest
from kcap.replay.jobs import ReplaySession
from kcap.replay.rebuild.memory import limit_host_memory
from kcap.replay.timing import device
from kcap.replay.worker import open_environment
from kcap.schemas.results.measurement import Measurement
from kcap.system.worker_process import Environment, receive_session, send


def main() -> None:
    """Answer requests until there are no more."""
    session: ReplaySession
    answers, session = receive_session()
    forks = Forks(answers)
    environment: Environment = orjson.loads(forks.run(partial(open_environment, session))[0])
    send(answers, environment)
    if "error" not in environment:
        forks.serve(Measurement, partial(measure_workload, session, environment["device"]))


def measure_workload(session: ReplaySession, on: str, request: TimingRequest) -> Measurement:
    """In a fork: the Measurement of the request's Workload on the device `on`."""
    if on == "cpu":
        limit_host_memory()
    environment = device.machine_fields(on, session["threads"])
    fields = time_reference(session, on, request)
    return Measurement.model_validate({**environment, **fields, **request["labels"]})


if __name__ == "__main__":
    main()

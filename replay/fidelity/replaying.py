"""The Calls and Programs of profiled steps replayed on a GPU, in a worker process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from kcap.errors import CallError
from kcap.replay.call_job import CallJob, Group
from kcap.replay.fidelity.engine import KindSteps
from kcap.replay.fidelity.nearest import Nearest
from kcap.replay.pool import Worker
from kcap.replay.program.alone import Alone
from kcap.replay.program.choose import Chosen, Kind
from kcap.replay.program.job import ProgramJob
from kcap.replay.program.options import LEAST_TIMEOUT_S
from kcap.replay.source import home_of
from kcap.schemas.measurement import Measurement
from kcap.schemas.program_measurement import ProgramMeasurement
from kcap.schemas.recording import Call, Recording

OTHERWISE = ": pass --device cpu"


@contextmanager
def replayer(
    recording: Recording, device: str | None, seconds: float, timeout: float, trust: bool
) -> Iterator[GpuReplayer]:
    """What replays `recording`'s Calls; CallError where there is no GPU."""
    session = {
        "home": home_of(recording.calls),
        "root": str(recording.path.resolve()),
        "namespaces": sorted({call.namespace for call in recording.calls}),
        "trust": trust,
        "device": device,
        "threads": None,
        "cache": "serving",
        "kernels": True,
    }
    with ExitStack() as stack:
        try:
            worker = stack.enter_context(Worker(session))
        except CallError as error:
            raise CallError(f"--fidelity replays on a GPU: {str(error).removesuffix(OTHERWISE)}") from None
        if not str(worker.environment["device"]).startswith("cuda"):
            raise CallError("--fidelity compares GPU time, and this Recording is of a CPU")
        yield GpuReplayer(recording, worker, seconds, timeout)


class GpuReplayer:
    """A Replayer; a Call that several kinds of steps ran on one Sample is replayed once."""

    def __init__(self, recording: Recording, worker: Worker, seconds: float, timeout: float) -> None:
        self.recording, self._worker = recording, worker
        self._seconds, self._timeout = seconds, timeout
        self._answers: dict[tuple[int, int | None], dict[str, Any]] = {}

    @property
    def environment(self) -> dict[str, Any]:
        return self._worker.environment

    def call(self, call: Call, chosen: Nearest, kind: KindSteps) -> Measurement:
        """As kcap.replay.fidelity.run.Replayer has it."""
        phase = kind.kind.phase
        job = CallJob({phase: kind.invocations[call.id]}, call, [Group(chosen.sample, chosen.index, [phase])])
        (request,) = job.requests(self._seconds)
        place = (call.id, chosen.index)
        if place not in self._answers:
            self._answers[place] = self._worker.run(request.body, self._timeout)
        return Measurement.model_validate({**self.environment, **self._answers[place], **request.told})

    def program(self, number: int, chosen: Mapping[int, Nearest], kind: KindSteps) -> ProgramMeasurement:
        """As kcap.replay.fidelity.run.Replayer has it, of the Calls that `call` replayed."""
        of = kind.kind
        one = Chosen(self.recording.program(number), Kind(of.phase, of.mode, of.padded), len(kind.steps))
        job = ProgramJob(self.recording, one, {call: sample.index for call, sample in chosen.items()})
        alone = {call: Alone.of(self._answers[call, chosen[call].index]) for call in job.counts}
        request = job.request(alone, self._seconds)
        answer = self._worker.run(request.body, max(self._timeout, LEAST_TIMEOUT_S))
        return job.measured(alone, answer, self.environment)

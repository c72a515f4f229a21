"""A Program to replay: the request to the worker, and the measurement that its answer makes.

Each of its Calls first runs alone, so that one that fails, crashes or cannot be captured does not end the process of a
Program. That also tells how the Call can be timed, and which kernels it launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NotRequired, TypedDict

from kcap.replay.jobs import BatchFields
from kcap.replay.program.choose import ChosenProgram, choose_samples
from kcap.replay.timing.sampling import holds_host_time
from kcap.schemas.recording.recording import Call, Recording
from kcap.schemas.results.measurement import Measurement, Method, ProgramCall, ProgramMeasurement, Status
from kcap.system.worker_process import Environment

MIN_TIMEOUT_S = 600.0  # a Program builds the inputs of a whole model


class ProgramPart(TypedDict):
    """A Call of a Program, as it ran alone. `sample`: the line of its Sample; `kernels`: launches of each, by name."""

    sample: int | None
    method: Method | None
    kernels: dict[str, int]
    waits: bool


class ProgramBody(TypedDict):
    """The Program of a request: its invocations as Calls, in `order`, and each Call under its number (a string)."""

    order: list[int]
    parts: dict[str, ProgramPart]


class ProgramRequest(TypedDict):
    """A Program to replay; `seconds`: of sampling; `batch`, `ranks`: as in a CallRequest."""

    program: ProgramBody
    seconds: float
    batch: NotRequired[BatchFields]
    ranks: NotRequired[int]


@dataclass(frozen=True)
class StandaloneResult:
    """The result of running one Call by itself. `kernels`: launches of each in one invocation, by name.

    `waits`: the host waits for the GPU in it.
    """

    status: Status
    reason: str | None = None
    method: Method | None = None
    kernels: Counter[str] = field(default_factory=Counter)
    waits: bool = False

    @classmethod
    def of(cls, answer: Mapping[str, Any] | Measurement) -> StandaloneResult:
        """From a worker's answer, or the Measurement that it made."""
        fields = answer.model_dump() if isinstance(answer, Measurement) else answer
        kernels: Counter[str] = Counter()
        for kernel in fields.get("kernels") or []:
            kernels[kernel["name"]] += round(kernel["count"])
        waits = holds_host_time(fields.get("notes") or [])
        return cls(fields["status"], fields.get("reason"), fields.get("method"), kernels, waits)


UNTRIED = StandaloneResult("skipped", "it was not tried alone")


@dataclass(frozen=True)
class ProgramJob:
    """A Program, and for each of its Calls the line in samples.jsonl of the Sample that it runs on."""

    recording: Recording
    chosen: ChosenProgram
    samples: Mapping[int, int | None]

    @cached_property
    def order(self) -> list[int]:
        """The Call of every invocation of a kernel that does work, in replayed graphs too."""
        invocations = self.recording.ran(self.chosen.program)
        return [call.id for call in invocations if call.kind == "kernel" and call.work]

    @cached_property
    def counts(self) -> Counter[int]:
        """The invocations of each Call."""
        return Counter(self.order)

    @property
    def calls(self) -> list[Call]:
        return [self.recording.calls[number] for number in self.counts]

    def request(self, standalone: Mapping[int, StandaloneResult], seconds: float) -> ProgramRequest:
        """To replay those Calls of the Program that ran alone."""
        good = {call: result for call, result in standalone.items() if result.status == "ok"}
        parts = {str(call): self._part(call, good[call]) for call in self.counts if call in good}
        program = ProgramBody(order=[call for call in self.order if call in good], parts=parts)
        request = ProgramRequest(program=program, seconds=seconds)
        sizes = Counter(call.group.size for call in self.calls if call.group and call.id in good)
        if sizes:  # a collective of a group of another size is left out
            request["ranks"] = sizes.most_common(1)[0][0]
        return request

    def _part(self, call: int, result: StandaloneResult) -> ProgramPart:
        kernels = dict(result.kernels)
        return {
            "sample": self.samples.get(call),
            "method": result.method,
            "kernels": kernels,
            "waits": result.waits,
        }

    def _labels(self) -> dict[str, Any]:
        program, kind, step = self.chosen.program, self.chosen.kind, self.chosen.step
        return {
            "program": program.id,
            "kind": program.kind,
            "phase": kind.phase,
            "mode": kind.mode,
            "padded": kind.padded,
            "step": step.index if step else None,
            "count": self.chosen.count,
            "invocations": len(self.order),
        }

    def measurement(
        self, standalone: Mapping[int, StandaloneResult], answer: Mapping[str, Any], environment: Environment
    ) -> ProgramMeasurement:
        """The measurement that the worker's `answer` makes; Calls that it left out say why."""
        answers = {call["call"]: call for call in answer.get("calls", [])}
        calls = [self._call(call, standalone.get(call, UNTRIED), answers.get(call, {})) for call in self.counts]
        return ProgramMeasurement.model_validate({**environment, **answer, **self._labels(), "calls": calls})

    def _call(self, call: int, standalone: StandaloneResult, answer: Mapping[str, Any]) -> ProgramCall:
        fields = {"status": standalone.status, "reason": standalone.reason, "sample": self.samples.get(call), **answer}
        fields |= {"call": call, "operator": self.recording.calls[call].operator, "count": self.counts[call]}
        return ProgramCall.model_validate(fields)


def program_job(recording: Recording, chosen: ChosenProgram) -> ProgramJob:
    """The Program `chosen`, on Samples that belong together."""
    calls = {call.id: call for call in recording.ran(chosen.program)}
    return ProgramJob(recording, chosen, choose_samples(recording, chosen, calls.values()))

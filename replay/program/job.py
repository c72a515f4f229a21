"""A Program to replay: what the worker is sent, and the measurement that its answer makes.

Each of its Calls is tried alone first, so that one that fails, crashes or cannot be captured costs no Program its
process; that tells how it runs and which kernels it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kcap.replay.jobs import Request
from kcap.replay.program.choose import ChosenProgram, choose_samples
from kcap.replay.timing.sampling import HOLD_GAVE_UP, WAITS_FOR_GPU
from kcap.schemas.recording.recording import Call, Recording
from kcap.schemas.results.measurement import Measurement, Method, ProgramCall, ProgramMeasurement, Status

LEAST_TIMEOUT_S = 600.0  # a Program builds the inputs of a whole model


@dataclass(frozen=True)
class AloneResult:
    """`kernels`: how often an invocation runs each, by name. `waits`: the host waits for the GPU in it."""

    status: Status
    reason: str | None = None
    method: Method | None = None
    kernels: Counter[str] = field(default_factory=Counter)
    waits: bool = False

    @classmethod
    def of(cls, answer: Mapping[str, Any] | Measurement) -> AloneResult:
        """From a worker's answer, or a Measurement of it."""
        known = answer.model_dump() if isinstance(answer, Measurement) else answer
        counted: Counter[str] = Counter()
        for kernel in known.get("kernels") or []:
            counted[kernel["name"]] += round(kernel["count"])
        waits = bool({WAITS_FOR_GPU, HOLD_GAVE_UP} & set(known.get("notes") or []))
        return cls(known["status"], known.get("reason"), known.get("method"), counted, waits)

    def as_json(self) -> dict[str, Any]:
        return {"method": self.method, "kernels": dict(self.kernels), "waits": self.waits}


UNTRIED = AloneResult("skipped", "it was not tried alone")


@dataclass(frozen=True)
class ProgramJob:
    """A Program and, by Call, on which Sample (its line of samples.jsonl) each runs."""

    recording: Recording
    chosen: ChosenProgram
    samples: Mapping[int, int | None]

    @cached_property
    def order(self) -> list[int]:
        """Every invocation of a kernel that does work, the replayed graphs' among them."""
        ran = self.recording.ran(self.chosen.program)
        return [call.id for call in ran if call.kind == "kernel" and call.work]

    @cached_property
    def counts(self) -> Counter[int]:
        """How often the Program has each Call."""
        return Counter(self.order)

    @property
    def calls(self) -> list[Call]:
        return [self.recording.calls[number] for number in self.counts]

    def request(self, alone: Mapping[int, AloneResult], seconds: float) -> Request:
        """What the worker is sent; `alone`: what is known of each Call. It runs those that ran alone."""
        good = {number: one for number, one in alone.items() if one.status == "ok"}
        parts = {str(n): {"sample": self.samples.get(n), **good[n].as_json()} for n in self.counts if n in good}
        body = {"program": {"order": [n for n in self.order if n in good], "parts": parts}, "seconds": seconds}
        return Request(body, self._told())

    def _told(self) -> dict[str, Any]:
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

    def measured(
        self, alone: Mapping[int, AloneResult], answer: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> ProgramMeasurement:
        """The measurement that the worker's `answer` makes, with what was left out."""
        answered = {call["call"]: call for call in answer.get("calls", [])}
        calls = [self._call(number, alone.get(number, UNTRIED), answered.get(number, {})) for number in self.counts]
        return ProgramMeasurement.model_validate({**environment, **answer, **self._told(), "calls": calls})

    def _call(self, number: int, alone: AloneResult, answered: Mapping[str, Any]) -> ProgramCall:
        known = {"status": alone.status, "reason": alone.reason, "sample": self.samples.get(number), **answered}
        known |= {"call": number, "operator": self.recording.calls[number].operator, "count": self.counts[number]}
        return ProgramCall.model_validate(known)


def program_job(recording: Recording, chosen: ChosenProgram) -> ProgramJob:
    """The Program `chosen` on the Samples that belong to it."""
    calls = {call.id: call for call in recording.ran(chosen.program)}
    return ProgramJob(recording, chosen, choose_samples(recording, chosen, calls.values()))

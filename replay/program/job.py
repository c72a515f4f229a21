"""A Program to replay: what the worker is sent, and the measurement that its answer makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kcap.replay.job import Request
from kcap.replay.program.alone import Alone
from kcap.replay.program.choose import Chosen
from kcap.replay.program.samples import choose_samples
from kcap.schemas.program_measurement import ProgramCall, ProgramMeasurement
from kcap.schemas.recording import Call, Recording

UNTRIED = Alone("skipped", "it was not tried alone")


@dataclass(frozen=True)
class ProgramJob:
    """A Program and, by Call, on which Sample (its line of samples.jsonl) each runs."""

    recording: Recording
    chosen: Chosen
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

    def request(self, alone: Mapping[int, Alone], seconds: float) -> Request:
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
        self, alone: Mapping[int, Alone], answer: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> ProgramMeasurement:
        """The measurement that the worker's `answer` makes, with what was left out."""
        answered = {call["call"]: call for call in answer.get("calls", [])}
        calls = [self._call(number, alone.get(number, UNTRIED), answered.get(number, {})) for number in self.counts]
        return ProgramMeasurement.model_validate({**environment, **answer, **self._told(), "calls": calls})

    def _call(self, number: int, alone: Alone, answered: Mapping[str, Any]) -> ProgramCall:
        known = {"status": alone.status, "reason": alone.reason, "sample": self.samples.get(number), **answered}
        known |= {"call": number, "operator": self.recording.calls[number].operator, "count": self.counts[number]}
        return ProgramCall.model_validate(known)


def job_of(recording: Recording, chosen: Chosen) -> ProgramJob:
    """The Program `chosen` on the Samples that belong to it."""
    calls = {call.id: call for call in recording.ran(chosen.program)}
    return ProgramJob(recording, chosen, choose_samples(recording, chosen, calls.values()))

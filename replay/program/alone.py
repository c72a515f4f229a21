"""What is known of a Call that was replayed alone, before the Programs that hold it: how it runs, which kernels it has.

It is tried alone first, so that one that fails, crashes or cannot be captured costs no Program its process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kcap.replay.timing.notes import GAVE_UP, HOST_IN_IT
from kcap.schemas.measurement import Measurement, Method, Status


@dataclass(frozen=True)
class Alone:
    """`kernels`: how often an invocation runs each, by name. `waits`: the host waits for the GPU in it."""

    status: Status
    reason: str | None = None
    method: Method | None = None
    kernels: Counter[str] = field(default_factory=Counter)
    waits: bool = False

    @classmethod
    def of(cls, answer: Mapping[str, Any] | Measurement) -> Alone:
        """From a worker's answer, or a Measurement of it."""
        known = answer.model_dump() if isinstance(answer, Measurement) else answer
        counted: Counter[str] = Counter()
        for kernel in known.get("kernels") or []:
            counted[kernel["name"]] += round(kernel["count"])
        waits = bool({HOST_IN_IT, GAVE_UP} & set(known.get("notes") or []))
        return cls(known["status"], known.get("reason"), known.get("method"), counted, waits)

    def as_json(self) -> dict[str, Any]:
        return {"method": self.method, "kernels": dict(self.kernels), "waits": self.waits}

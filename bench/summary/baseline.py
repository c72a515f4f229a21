"""What a Workload took before: by its reference, or by the engine's own kernels as `kcap replay` timed them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kcap.schemas.outcome import Outcome

Of: TypeAlias = tuple[str, str]  # a Definition and a Workload of it
Times: TypeAlias = "Mapping[str, float]"  # microseconds by phase


class Baseline(ABC):
    """What time is saved of. `totals`: the whole, by phase; empty where it is not known."""

    title: str
    totals: Times
    notes: Sequence[str] = ()

    @abstractmethod
    def before(self, outcome: Outcome, counts: Mapping[str, int]) -> Times:
        """Microseconds by phase of the Workload's `counts` invocations; none where that is not known."""


class References(Baseline):
    """Each Workload's reference, timed beside the Solution."""

    title = "the references"
    totals: Times = {}

    def before(self, outcome: Outcome, counts: Mapping[str, int]) -> Times:
        reference = outcome.reference
        return {phase: n * reference.median_us for phase, n in counts.items()} if reference else {}


@dataclass(frozen=True)
class Measured(Baseline):
    """Times of `kcap replay`, by Definition and Workload."""

    title: str
    times: Mapping[Of, Times]
    totals: Times
    notes: Sequence[str] = ()

    def before(self, outcome: Outcome, counts: Mapping[str, int]) -> Times:
        return self.times.get((outcome.definition, outcome.workload), {})

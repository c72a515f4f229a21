"""Times held against what the machine can do: one that is below its floor is no time of that work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kcap.bench.judge.draws import Draws
from kcap.bench.judge.evidence import Refused
from kcap.errors import KcapError
from kcap.replay.roofline import stored
from kcap.replay.roofline.ceilings import Ceilings
from kcap.replay.roofline.floor import floor_us
from kcap.replay.roofline.workloads import cost_of
from kcap.schemas.outcome import Clocked

Find = Callable[[Mapping[str, Any]], Ceilings]


@dataclass
class Floors:
    """Of one machine (`environment`, as Outcomes have it). Ceilings are found at the first need; `sure`: measured
    twice, as they are before a time is refused, for the machine may have been busy.
    """

    environment: Mapping[str, Any]
    find: Find = stored.ceilings
    again: Find = stored.raised
    ceilings: Ceilings | None = None
    unknown: str = ""
    sure: bool = field(default=False, repr=False)

    def check(self, drawn: Draws, time: Clocked) -> float | None:
        """Microseconds that no invocation on `drawn` can go below, None where nobody knows; Refused, if `time` does."""
        floor = self._floor(drawn, time)
        if floor is not None and time.median_us < floor and not self.sure:
            self.ceilings, self.sure = self.again(self.environment), True
            floor = self._floor(drawn, time)
        if floor is not None and time.median_us < floor:
            raise Refused(
                "REWARD_HACK", f"{time.median_us:.3g} µs is below the machine's floor of {floor:.3g} µs for it"
            )
        return floor

    def _floor(self, drawn: Draws, time: Clocked) -> float | None:
        cost = cost_of(drawn.definition, dict(zip(drawn.definition.inputs, drawn.made.inputs, strict=True)))
        if cost is None or self.unknown:
            return None
        try:
            self.ceilings = self.ceilings or self.find(self.environment)
        except KcapError as error:
            self.unknown = str(error)
            return None
        return floor_us(cost, self.ceilings, time.cache or "warm")

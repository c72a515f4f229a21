"""Times held against what the machine can do: one that is below its floor is no time of that work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kcap.bench.judge.draws import Draws
from kcap.bench.judge.evidence import Refused
from kcap.bench.judge.room import check_room
from kcap.errors import KcapError
from kcap.replay.roofline import stored
from kcap.replay.roofline.ceilings import Ceilings
from kcap.replay.roofline.floor import floor_us
from kcap.replay.roofline.workloads import cost_of
from kcap.schemas.outcome import Clocked

FILES = 8  # that it takes to start the process which measures

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
            self._ask(self.again)
            self.sure = True
            floor = self._floor(drawn, time)
        if floor is not None and time.median_us < floor:
            words = f"{time.median_us:.3g} µs is below the machine's floor of {floor:.3g} µs for it"
            raise Refused("REWARD_HACK", words)
        return floor

    def _floor(self, drawn: Draws, time: Clocked) -> float | None:
        cost = cost_of(drawn.definition, dict(zip(drawn.definition.inputs, drawn.made.inputs, strict=True)))
        if cost is not None and self.ceilings is None and not self.unknown:
            self._ask(self.find)
        if cost is None or self.ceilings is None:
            return None
        return floor_us(cost, self.ceilings, time.cache or "warm")

    def _ask(self, how: Find) -> None:
        check_room(FILES)  # else what is lacking now would be unknown for good
        try:
            self.ceilings = how(self.environment)
        except KcapError as error:
            self.ceilings, self.unknown = None, str(error)

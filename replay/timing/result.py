"""What a clock found."""

from __future__ import annotations

from dataclasses import dataclass, field

from kcap.schemas.measurement import Cache, Method, StopRule


@dataclass(frozen=True)
class Timing:
    """Microseconds of one invocation, once for each sample of the clock; a sample is `n` invocations.

    `spoiled`: the process should time nothing after this.
    """

    samples_us: list[float]
    n: int
    stop: StopRule
    method: Method
    cache: Cache
    input_sets: int
    notes: list[str] = field(default_factory=list)
    spoiled: bool = False
    floor_us: float | None = None

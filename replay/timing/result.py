"""What a clock found."""

from __future__ import annotations

from dataclasses import dataclass, field

from kcap.schemas.measurement import Cache, KernelDuration, Method, StopRule


@dataclass(frozen=True)
class Timing:
    """Microseconds of one invocation, once for each sample of the clock; a sample is `n` invocations.

    `slow`: the places of samples taken while the clock was slow. `spoiled`: the process should time nothing after this.
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
    slow: list[int] = field(default_factory=list)
    kernels: list[KernelDuration] = field(default_factory=list)

    @property
    def counted_us(self) -> list[float]:
        """The samples of which median and quartiles are: all but the slow ones, unless there are no others."""
        return counted(self.samples_us, self.slow)


def counted(samples: list[float], slow: list[int]) -> list[float]:
    """All `samples` but those at the places `slow`, unless there are no others."""
    places = set(slow)
    return [us for place, us in enumerate(samples) if place not in places] or samples

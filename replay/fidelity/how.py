"""How a replayed time came about: what its measurement says beside the time."""

from __future__ import annotations

from dataclasses import dataclass

from kcap.schemas.measurement import DROPPED, Cache, Measurement, Method, StopRule
from kcap.schemas.program_measurement import ProgramMeasurement


@dataclass(frozen=True)
class How:
    """As in a Measurement. `slow_samples`: how many of the clock's `samples` are not in the median."""

    method: Method | None = None
    cache: Cache | None = None
    stop: StopRule | None = None
    samples: int = 0
    slow_samples: int = 0
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, one: Measurement | ProgramMeasurement) -> How:
        return cls(one.method, one.cache, one.stop, len(one.samples_us), len(one.slow_samples), tuple(one.notes))

    @property
    def warm(self) -> bool:
        """Whether the GPU found its inputs in the caches, though the state asked for was `serving`."""
        return self.cache == "warm" and self.method not in ("none", "host")

    @property
    def remarks(self) -> list[str]:
        """The notes, each once and without the number of samples, which differs from Call to Call."""
        return list(dict.fromkeys(DROPPED if note.endswith(DROPPED) else note for note in self.notes))


UNKNOWN = How()

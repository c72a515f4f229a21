"""A machine's ceilings: bandwidth by working set, arithmetic by dtype, as measured once on it, stated with results.

Bandwidths are GB/s (1e9 bytes, read and written both counted), arithmetic is TFLOP/s, sizes are bytes.
"""

from __future__ import annotations

from pydantic import Field, FiniteFloat

from kcap.schemas.dtypes import BY_NAME
from kcap.schemas.records import Record

TF32 = "tf32"  # float32 whose products are rounded to 10 bits of mantissa, as a GPU's matrix units take it
WIDTHS = {TF32: 32, "float4_e2m1": 4}
NARROWER = 4.0  # how much faster than all that was measured a dtype may be that is narrower than all of that


class Level(Record):
    """The best bandwidth measured over a working set of `size` bytes, or of a larger one."""

    size: int = Field(ge=0)
    gb_s: FiniteFloat = Field(gt=0)

    def line(self) -> bytes:
        raise TypeError("a Level is part of the Ceilings' line")


class Ceilings(Record):
    """What was measured on one device, `threads` of a CPU at once.

    `levels` ascend, the first is of 0 bytes: what no working set moves faster than. `cache_bytes`: the last-level
    cache. `empty_us`: microseconds of a kernel that does next to nothing, back to back.
    """

    device: str = "cpu"
    device_name: str = ""
    driver: str | None = None
    torch: str = ""
    threads: int | None = None
    levels: list[Level] = Field(min_length=1)
    tflop_s: dict[str, FiniteFloat] = {}
    cache_bytes: int = 0
    empty_us: FiniteFloat = 0.0

    @property
    def memory_gb_s(self) -> float:
        """The bandwidth of main memory: of the largest working set."""
        return self.levels[-1].gb_s

    def bandwidth(self, working_set: float) -> float:
        """GB/s that nothing beats over so many bytes, half of which may stay in a nearer cache meanwhile."""
        return self.at(working_set / 2)

    @property
    def top(self) -> float:
        return self.levels[0].gb_s

    def peak(self, dtype: str) -> float | None:
        """TFLOP/s that no product of matrices of `dtype` beats; None where nothing comparable was measured.

        A narrow dtype may be computed as a wider one, never the other way round.
        """
        if not self.tflop_s:
            return None
        wanted = width(dtype)
        if wanted < min(map(width, self.tflop_s)):
            return NARROWER * max(self.tflop_s.values())
        return max((rate for name, rate in self.tflop_s.items() if width(name) >= wanted), default=None)

    def raised(self, other: Ceilings) -> Ceilings:
        """The higher of both, where `other` was measured on the same device at another time."""
        both = {level.size for one in (self, other) for level in one.levels}
        levels = [(size, max(one.at(size) for one in (self, other))) for size in sorted(both)]
        rates = {
            name: max(self.tflop_s.get(name, 0.0), other.tflop_s.get(name, 0.0))
            for name in (*self.tflop_s, *other.tflop_s)
        }
        faster = min(self.empty_us, other.empty_us)
        return self.model_copy(update={"levels": descending(levels), "tflop_s": rates, "empty_us": faster})

    def at(self, size: float) -> float:
        """The bandwidth measured over `size` bytes, or over the next smaller working set."""
        return next((level.gb_s for level in reversed(self.levels) if level.size <= size), self.top)


def width(dtype: str) -> int:
    """The bits of a number of `dtype`; those of the narrowest where nobody knows it."""
    known = BY_NAME.get(dtype)
    return WIDTHS.get(dtype, known.bits if known else min(WIDTHS.values()))


def descending(measured: list[tuple[int, float]]) -> list[Level]:
    """Levels of `measured` (size, GB/s), ascending in size: a small working set is as fast as any larger one."""
    levels: list[Level] = []
    best = 0.0
    for size, rate in sorted(measured, reverse=True):
        best = max(best, rate)
        levels.insert(0, Level(size=size, gb_s=best))
    return levels

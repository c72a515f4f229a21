"""Measurements put together: one row a Call, the time of the whole, and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from kcap.replay.source import Job
from kcap.schemas.measurement import Measurement
from kcap.schemas.signature import signature


@dataclass(frozen=True)
class Row:
    """A Call and its measurements. Times are microseconds of one invocation."""

    job: Job
    measurements: list[Measurement]

    @property
    def status(self) -> str:
        """`failed` if any Sample failed, `ok` if one could be timed, else `skipped`."""
        states = {measurement.status for measurement in self.measurements}
        return next((state for state in ("failed", "ok") if state in states), "skipped")

    @property
    def reason(self) -> str:
        return next((m.reason or "" for m in self.measurements if m.status == self.status), "")

    @property
    def total_us(self) -> float | None:
        """Count times time, phase by phase: each phase's count takes the mean over that phase's Samples."""
        timed = [m for m in self.measurements if m.median_us is not None]
        if not timed:
            return None
        return sum(count * _mean(timed, phase) for phase, count in self.job.counts.items())

    @property
    def time_us(self) -> float | None:
        """The mean time of one invocation."""
        total = self.total_us
        return None if total is None else total / self.job.count

    def as_json(self) -> dict[str, Any]:
        call = self.job.call
        return {
            "call": call.id,
            "operator": call.operator,
            "signature": signature(call.args),
            "count": self.job.count,
            "phases": self.job.counts,
            "status": self.status,
            "reason": self.reason or None,
            "time_us": self.time_us,
            "total_us": self.total_us,
            "samples": len(self.measurements),
        }


def _mean(measurements: Sequence[Measurement], phase: str) -> float:
    """Over the Samples of `phase`; over all where none is of it, or none names its phase."""
    medians = [m.median_us for m in measurements if m.median_us is not None and (not m.phases or phase in m.phases)]
    return fmean(medians or [m.median_us for m in measurements if m.median_us is not None])


@dataclass
class Results:
    """All rows, the slowest share first."""

    rows: list[Row] = field(default_factory=list)

    def of(self, status: str) -> list[Row]:
        return [row for row in self.rows if row.status == status]

    def timed(self) -> list[Row]:
        rows = [row for row in self.rows if row.total_us is not None]
        return sorted(rows, key=lambda row: -(row.total_us or 0))

    @property
    def total_us(self) -> float:
        return sum(row.total_us or 0 for row in self.rows)

    @property
    def count(self) -> int:
        return counted(self.rows)

    def reasons(self, status: str) -> list[tuple[str, int, int]]:
        """Why Calls were left out: reason, Calls, their count; the largest count first."""
        calls: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for row in self.of(status):
            calls[row.reason] += 1
            counts[row.reason] += row.job.count
        return [(reason, calls[reason], count) for reason, count in counts.most_common()]

    def as_json(self) -> dict[str, Any]:
        shares = {state: counted(self.of(state)) for state in ("ok", "skipped", "failed")}
        rows = self.timed() + [row for row in self.rows if row.total_us is None]
        return {
            "total_us": self.total_us,
            "counts": {"all": self.count, **shares},
            "calls": [r.as_json() for r in rows],
        }


def counted(rows: Iterable[Row]) -> int:
    return sum(row.job.count for row in rows)

"""Measurements in rows: one for each Call, the total time, and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from kcap.replay.jobs import Job
from kcap.schemas.results.measurement import Measurement, Status, mean_us, of_phase


@dataclass(frozen=True)
class Row:
    """A job and its measurements. Times are microseconds of one invocation."""

    job: Job
    measurements: list[Measurement]

    @property
    def status(self) -> Status:
        return status_of(self.measurements)

    @property
    def reason(self) -> str:
        """Why a Sample, at least, was not replayed."""
        return self.reason_of("failed") or self.reason_of("skipped")

    def reason_of(self, status: Status) -> str:
        return next((m.reason or "" for m in self.measurements if m.status == status), "")

    def has(self, status: Status) -> bool:
        return any(m.status == status for m in self.measurements)

    def count_of(self, status: Status) -> int:
        """Invocations in the phases whose Samples have this status."""
        counts = self.job.counts.items()
        return sum(count for phase, count in counts if status_of(of_phase(self.measurements, phase)) == status)

    @property
    def total_us(self) -> float | None:
        """Count times time, phase by phase: each phase's count takes the mean over that phase's Samples."""
        times = list(self._times())
        return sum(count * us for count, us in times) if times else None

    @property
    def time_us(self) -> float | None:
        """The mean time of one invocation."""
        times = list(self._times())
        return sum(count * us for count, us in times) / sum(count for count, _ in times) if times else None

    def _times(self) -> Iterator[tuple[int, float]]:
        """The count of each phase that was timed, and the time of one invocation."""
        for phase, count in self.job.counts.items():
            if (us := mean_us(self.measurements, phase)) is not None:
                yield count, us

    @property
    def timed(self) -> Measurement | None:
        """The first measurement that has a time: all Samples of a Call are timed by the same clock."""
        return next((m for m in self.measurements if m.median_us is not None), None)

    @property
    def on_host(self) -> bool:
        return self.timed is not None and self.timed.method == "host"

    def noted(self, note: str) -> bool:
        """Whether a measurement has this note, or one that begins with it."""
        return any(entry.startswith(note) for measurement in self.measurements for entry in measurement.notes)

    def as_json(self) -> dict[str, Any]:
        return {
            **self.job.as_json(),
            "count": self.job.count,
            "phases": self.job.counts,
            "status": self.status,
            "reason": self.reason or None,
            "time_us": self.time_us,
            "total_us": self.total_us,
            "method": self.timed.method if self.timed else None,
            "cache": self.timed.cache if self.timed else None,
            "samples": len(self.measurements),
            **self._roofline(),
            "notes": sorted({note for measurement in self.measurements for note in measurement.notes}),
        }

    @property
    def times_floor(self) -> float | None:
        """The Call's time over its floor, over those of its Samples that have one."""
        pairs = [(m.median_us, m.roofline.us) for m in self.measurements if m.median_us is not None and m.roofline]
        return sum(us for us, _ in pairs) / sum(floor for _, floor in pairs) if pairs else None

    def _roofline(self) -> dict[str, Any]:
        """Means over the Samples that have a floor."""
        pairs = [(m.work, m.roofline) for m in self.measurements if m.work and m.roofline]
        if not pairs:
            return {}
        return {
            "bytes": round(fmean(work.moved for work, _ in pairs)),
            "flops": round(fmean(work.flops for work, _ in pairs)),
            "roofline_us": fmean(roof.us for _, roof in pairs),
            "times_floor": self.times_floor,
            "gb_s": fmean(roof.gb_s for _, roof in pairs),
            "tflop_s": fmean(roof.tflop_s for _, roof in pairs),
        }


def status_of(measurements: Iterable[Measurement]) -> Status:
    """`failed` if any Sample failed, `ok` if one could be timed, else `skipped`."""
    states = {measurement.status for measurement in measurements}
    return "failed" if "failed" in states else "ok" if "ok" in states else "skipped"


@dataclass
class Results:
    """All rows, the slowest share first."""

    rows: list[Row] = field(default_factory=list)

    def of(self, status: Status) -> list[Row]:
        return [row for row in self.rows if row.status == status]

    def count_of(self, status: Status) -> int:
        return sum(row.count_of(status) for row in self.rows)

    def timed(self, host: bool) -> list[Row]:
        """The rows that the host's clock timed, or the GPU's: two times that are never added."""
        rows = [row for row in self.rows if row.total_us is not None and row.on_host is host]
        return sorted(rows, key=lambda row: -(row.total_us or 0))

    @property
    def gpu_us(self) -> float:
        return total_us(self.timed(host=False))

    @property
    def host_us(self) -> float:
        return total_us(self.timed(host=True))

    def noted(self, note: str) -> list[Row]:
        return [row for row in self.rows if row.noted(note)]

    @property
    def count(self) -> int:
        return total_count(self.rows)

    def reasons(self, status: Status) -> list[tuple[str, int, int]]:
        """Why Samples were left out: reason, their Calls, the invocations that have no time for it; most first."""
        calls: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for row in self.rows:
            if row.has(status):
                calls[row.reason_of(status)] += 1
                counts[row.reason_of(status)] += row.count_of(status)
        return [(reason, calls[reason], count) for reason, count in counts.most_common()]

    def as_json(self) -> dict[str, Any]:
        """The summary first, then every Call."""
        rows = self.timed(host=False) + self.timed(host=True)
        return {
            **self.summary(),
            "calls": [row.as_json() for row in rows + [row for row in self.rows if row.total_us is None]],
        }

    def summary(self) -> dict[str, Any]:
        """What was replayed, skipped and failed; shares are of the counts. GPU time and host time apart."""
        return {
            "replayed": self._part("ok"),
            "skipped": {**self._part("skipped"), "reasons": self._reasons("skipped")},
            "failed": {**self._part("failed"), "reasons": self._reasons("failed")},
            "gpu_time_us": self.gpu_us,
            "host_time_us": self.host_us,
        }

    def _part(self, status: Status) -> dict[str, Any]:
        """A Call whose phases differ is in several."""
        count, calls = self.count_of(status), sum(row.count_of(status) > 0 for row in self.rows)
        return {"calls": calls, "count": count, "share": count / self.count if self.count else 0.0}

    def _reasons(self, status: Status) -> list[dict[str, Any]]:
        return [{"reason": reason, "calls": calls, "count": n} for reason, calls, n in self.reasons(status)]


def total_us(rows: Iterable[Row]) -> float:
    return sum(row.total_us or 0 for row in rows)


def total_count(rows: Iterable[Row]) -> int:
    return sum(row.job.count for row in rows)

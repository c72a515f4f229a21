"""How long each job is sampled: what hardly counts gets a fifth, so that a whole Recording takes its minute."""

from __future__ import annotations

from collections.abc import Sequence

from kcap.replay.job import Job

LITTLE = 0.001  # of the time that all jobs are expected to take
SHARE = 0.2


def seconds_of(jobs: Sequence[Job], seconds: float) -> list[float]:
    """Seconds of sampling for each of `jobs`: `seconds`, or a fifth where its share of the whole will be tiny."""
    expected = [job.expected_us for job in jobs]
    whole = sum(expected)
    return [seconds if us >= LITTLE * whole else SHARE * seconds for us in expected]

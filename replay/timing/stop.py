"""When to stop sampling: the median is known well enough, or the time is up. Every sample is kept."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from kcap.schemas.measurement import StopRule

FEWEST = 10  # samples before the error may stop the clock
PRECISION = 0.005  # standard error of the mean over the median


@dataclass(frozen=True)
class Budget:
    """Seconds of sampling: at least `least` (unless the limit comes first), never begun anew after `most`."""

    least: float
    most: float


def converged(samples: list[float]) -> bool:
    """Whether the standard error of the mean is below half a percent of the median, over at least ten samples."""
    if len(samples) < FEWEST:
        return False
    error = statistics.stdev(samples) / len(samples) ** 0.5
    return bool(error < PRECISION * statistics.median(samples))


def sample_until(
    take: Callable[[], float], budget: Budget, clock: Callable[[], float] = time.perf_counter
) -> tuple[list[float], StopRule]:
    """Call `take` until the stop rule fires; its results, at least one, and the rule's name."""
    start = clock()
    samples = [take()]
    while (elapsed := clock() - start) < budget.most:
        if elapsed >= budget.least and converged(samples):
            return samples, "converged"
        samples.append(take())
    return samples, "limit"

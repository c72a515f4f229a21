"""When to stop sampling: the median is known well enough, or no better than the noise allows, or the time is up.

Every sample is kept; those that a slow clock spoiled are marked, and count for no rule.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kcap.schemas.measurement import StopRule

FEWEST = 10  # samples before the error may stop the clock
PRECISION = 0.005  # standard error of the mean over the median
PRECISION_OF_A_GPU = 0.0015  # which is quiet enough for it
LIMIT_FACTOR = 3  # sampling may take this many times the seconds asked for, if the median stays uncertain
LIMIT_FACTOR_OF_A_GPU = 8  # as far as that is no more than these seconds
LIMIT_OF_A_GPU_S = 20.0
# The rule by which nvbench stops what is noisy by nature (its stdrel_criterion.cxx): of the last relative standard
# deviations, one a sample, the spread around the newest is below a twentieth of it.
NOISE_WINDOW = 512
FEWEST_NOISES = 64
NOISE_EVERY = 16  # samples between two looks
NOISE_SPREAD = 0.05


@dataclass(frozen=True)
class Budget:
    """Seconds of sampling: at least `least` (unless the limit comes first), never begun anew after the limit `most`.

    `precision`: the standard error of the mean over the median below which it ends.
    """

    least: float
    most: float
    precision: float = PRECISION

    @classmethod
    def on(cls, device: str, seconds: float) -> Budget:
        """That of `seconds` of sampling on `device`."""
        if device.startswith("cuda"):
            longer = min(LIMIT_FACTOR_OF_A_GPU * seconds, LIMIT_OF_A_GPU_S)
            return cls(seconds, max(LIMIT_FACTOR * seconds, longer), PRECISION_OF_A_GPU)
        return cls(seconds, LIMIT_FACTOR * seconds)


@dataclass(frozen=True)
class Sampled:
    """Every sample in its order, the rule that stopped them, and the places of those taken while the clock was slow."""

    samples: list[float]
    rule: StopRule
    slow: list[int] = field(default_factory=list)


class Noise:
    """Mean, spread and median of the samples so far, and how the spread changed. `precision`: as in a Budget."""

    def __init__(self, precision: float = PRECISION) -> None:
        self.n, self.mean, self._squares = 0, 0.0, 0.0
        self.precision = precision
        self._sorted: list[float] = []
        self._spreads: deque[float] = deque(maxlen=NOISE_WINDOW)

    def add(self, sample: float) -> None:
        self.n += 1
        step = sample - self.mean
        self.mean += step / self.n
        self._squares += step * (sample - self.mean)
        insort(self._sorted, sample)
        if self.n > 1 and self.mean > 0:
            self._spreads.append(self.deviation / self.mean)

    @property
    def deviation(self) -> float:
        """The standard deviation of the samples, of at least two."""
        return math.sqrt(max(self._squares, 0.0) / (self.n - 1))

    @property
    def median(self) -> float:
        half = self.n // 2
        return self._sorted[half] if self.n % 2 else (self._sorted[half - 1] + self._sorted[half]) / 2

    @property
    def converged(self) -> bool:
        """Whether the standard error of the mean is below the precision asked for, over at least ten samples."""
        return self.n >= FEWEST and self.deviation / math.sqrt(self.n) < self.precision * self.median

    @property
    def stable(self) -> bool:
        """Whether more samples would not change what is known of the spread."""
        if len(self._spreads) <= FEWEST_NOISES or self.n % NOISE_EVERY:
            return False
        now = self._spreads[-1]
        off = sum((spread - now) ** 2 for spread in self._spreads) / (len(self._spreads) - 1)
        return math.sqrt(off) < NOISE_SPREAD * now

    @property
    def rule(self) -> StopRule | None:
        return "converged" if self.converged else "stable" if self.stable else None


def never() -> bool:
    return False


def sample_until(
    take: Callable[[], float],
    budget: Budget,
    clock: Callable[[], float] = time.perf_counter,
    slow: Callable[[], bool] = never,
    fewest: int = 1,
) -> Sampled:
    """Call `take` until a stop rule fires; `slow` says of the sample just taken that it is spoiled.

    `fewest`: samples before the limit may stop it.
    """
    start = clock()
    noise, samples, spoiled = Noise(budget.precision), [], []
    while True:
        samples.append(take())
        if slow():
            spoiled.append(len(samples) - 1)
        else:
            noise.add(samples[-1])
        elapsed = clock() - start
        if elapsed >= budget.most and len(samples) >= fewest:
            return Sampled(samples, "limit", spoiled)
        if elapsed >= budget.least and (rule := noise.rule):
            return Sampled(samples, rule, spoiled)

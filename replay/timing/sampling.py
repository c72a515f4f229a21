"""A clock's samples: when to stop taking them, and what came of it.

Sampling ends when the median is known well enough, or no better than the noise allows, or the time is up. Every sample
is kept; those that a slow clock spoiled are marked, and count for no rule.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kcap.schemas.results.measurement import Cache, KernelDuration, Method, StopRule

FEWEST_SAMPLES = 10  # samples before the error may stop the clock


PRECISION = 0.005  # standard error of the mean over the median


GPU_PRECISION = 0.0015  # which is quiet enough for it


LIMIT_FACTOR = 3  # sampling may take this many times the seconds asked for, if the median stays uncertain


GPU_LIMIT_FACTOR = 8  # as far as that is no more than these seconds


GPU_LIMIT_S = 20.0


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
            longer = min(GPU_LIMIT_FACTOR * seconds, GPU_LIMIT_S)
            return cls(seconds, max(LIMIT_FACTOR * seconds, longer), GPU_PRECISION)
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
        return self.n >= FEWEST_SAMPLES and self.deviation / math.sqrt(self.n) < self.precision * self.median

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


def never_slow() -> bool:
    return False


def sample_until(
    take: Callable[[], float],
    budget: Budget,
    clock: Callable[[], float] = time.perf_counter,
    slow: Callable[[], bool] = never_slow,
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
        return counted_samples(self.samples_us, self.slow)


def counted_samples(samples: list[float], slow: list[int]) -> list[float]:
    """All `samples` but those at the places `slow`, unless there are no others."""
    places = set(slow)
    return [us for place, us in enumerate(samples) if place not in places] or samples


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile (inclusive method) of at least one number."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return q1, median, q3


WAITS_FOR_GPU = "the host's time is in it: it waits for the GPU"


HOLD_GAVE_UP = "the host's time is in it: the kernel that holds the GPU back gave up"

"""A clock's samples: when to stop taking them, and their result.

Sampling ends when the mean is precise enough (`converged`), when the noise itself no longer changes (`stable`), or at
the time limit. Every sample is kept; those taken at a slow clock are marked and ignored by the stop rules.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kcap.schemas.results.measurement import Cache, KernelDuration, Method, StopRule

FEWEST_SAMPLES = 10  # before `converged` may end sampling
PRECISION, GPU_PRECISION = 0.005, 0.0015  # the standard error of the mean over the median; a GPU has less noise
LIMIT_FACTOR = 3  # sampling may take this many times the seconds asked for, if it does not converge,
GPU_LIMIT_FACTOR, GPU_LIMIT_S = 8, 20.0  # on a GPU even so many times, up to so many seconds

# `stable` is the rule by which nvbench stops a measurement that is noisy by nature (its stdrel_criterion.cxx): after
# each sample it notes the relative standard deviation; these deviate from the newest by less than 5 % of it.
NOISE_WINDOW, MIN_NOISE_WINDOW = 512, 64
NOISE_EVERY = 16  # samples between two checks
NOISE_SPREAD = 0.05


@dataclass(frozen=True)
class Budget:
    """Seconds of sampling: at least `least`, and no new sample after `most`.

    `precision`: sampling ends when the standard error of the mean over the median is below it.
    """

    least: float
    most: float
    precision: float = PRECISION

    @classmethod
    def on(cls, device: str, seconds: float) -> Budget:
        """The Budget for `seconds` of sampling on `device`."""
        if device.startswith("cuda"):
            longer = min(GPU_LIMIT_FACTOR * seconds, GPU_LIMIT_S)
            return cls(seconds, max(LIMIT_FACTOR * seconds, longer), GPU_PRECISION)
        return cls(seconds, LIMIT_FACTOR * seconds)


@dataclass(frozen=True)
class Sampled:
    """Every sample in order, the rule that ended sampling, and the indices of samples taken at a slow clock."""

    samples: list[float]
    rule: StopRule
    slow: list[int] = field(default_factory=list)


class Noise:
    """Mean, deviation and median of the samples so far, and the history of the relative deviation."""

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
        """Whether the standard error of the mean is below the precision, after at least ten samples."""
        return self.n >= FEWEST_SAMPLES and self.deviation / math.sqrt(self.n) < self.precision * self.median

    @property
    def noise_limited(self) -> bool:
        """Whether more samples would not change the relative deviation."""
        if len(self._spreads) <= MIN_NOISE_WINDOW or self.n % NOISE_EVERY:
            return False
        now = self._spreads[-1]
        off = sum((spread - now) ** 2 for spread in self._spreads) / (len(self._spreads) - 1)
        return math.sqrt(off) < NOISE_SPREAD * now

    @property
    def rule(self) -> StopRule | None:
        return "converged" if self.converged else "stable" if self.noise_limited else None


def never_slow() -> bool:
    return False


def sample_until(
    take_sample: Callable[[], float],
    budget: Budget,
    clock: Callable[[], float] = time.perf_counter,
    is_slow: Callable[[], bool] = never_slow,
    min_samples: int = 1,
) -> Sampled:
    """Call `take_sample` until a stop rule holds; `is_slow` tells whether the sample just taken must not count.

    `min_samples`: before the time limit may end it.
    """
    start = clock()
    noise, samples, slow = Noise(budget.precision), [], []
    while True:
        samples.append(take_sample())
        if is_slow():
            slow.append(len(samples) - 1)
        else:
            noise.add(samples[-1])
        elapsed = clock() - start
        if elapsed >= budget.most and len(samples) >= min_samples:
            return Sampled(samples, "limit", slow)
        if elapsed >= budget.least and (rule := noise.rule):
            return Sampled(samples, rule, slow)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one invocation, by samples of `n` invocations each.

    `slow`: the indices of samples taken at a slow clock. `poisoned`: the process must time nothing after this.
    """

    samples_us: list[float]
    n: int
    stop: StopRule
    method: Method
    cache: Cache
    input_sets: int
    notes: list[str] = field(default_factory=list)
    poisoned: bool = False
    floor_us: float | None = None
    slow: list[int] = field(default_factory=list)
    kernels: list[KernelDuration] = field(default_factory=list)

    @property
    def counted_us(self) -> list[float]:
        """The samples that count for median and quartiles: all but the slow ones, unless there are no others."""
        return counted_samples(self.samples_us, self.slow)


def counted_samples(samples: list[float], slow: list[int]) -> list[float]:
    """All `samples` but those at the indices `slow`, unless there are no others."""
    indices = set(slow)
    return [us for index, us in enumerate(samples) if index not in indices] or samples


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile (inclusive method) of at least one number."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return q1, median, q3


WAITS_FOR_GPU = "the host's time is in it: it waits for the GPU"
BLOCKER_TIMED_OUT = "the host's time is in it: the kernel that holds the GPU back gave up"


def holds_host_time(notes: Iterable[str]) -> bool:
    """Whether one of a measurement's `notes` says so."""
    return any(note in (WAITS_FOR_GPU, BLOCKER_TIMED_OUT) for note in notes)

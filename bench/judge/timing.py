"""Times of a Solution, and of the reference in turns with it, by the judge's own clock.

A batch is a run of many invocations with fresh inputs: the clock runs from when the candidate's process may run, or its
graphs' gate is opened and the GPU has turned to it, until all of its sandbox stands still, and on a GPU until the judge
has copies of outputs. Its time is that, divided by the invocations; nothing is taken off. What the way there and back
takes is measured with a run of no invocations, and batches are so long that it is a small share of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch

from kcap.bench.judge.candidate import FEW, Candidate, fresh_seed
from kcap.bench.judge.driver import protocol
from kcap.bench.judge.input_pool import InputPool
from kcap.bench.judge.verdict import Rejected, check_report
from kcap.replay.timing.rotation import COLD_FACTOR
from kcap.replay.timing.sampling import LIMIT_FACTOR, Budget, quartiles, sample_until
from kcap.schemas.results.measurement import Cache, Method, StopRule
from kcap.schemas.results.outcome import Clocked, Status

BATCH_NS = 2_500_000  # the least that a batch lasts,
GPU_BATCH_NS = 30_000_000  # on a GPU, as far as memory goes: who starts early there gains a fraction of a millisecond,
WAY_SHARE = 0.02  # and the most that the way there and back is of it
MOST_GUESSED = 8  # times the least, that a batch may last by what the first run took
LONG_ENOUGH = 0.8  # of what a batch should last
CHOSEN = 3  # invocations of a batch that are compared
WAYS = 3  # runs of no invocations
FEWEST, FEWEST_OF_REFERENCE = 5, 3  # batches
MOST_GROWTH = 64  # times the invocations, from one batch to the next: a clock may be disturbed
MOST_ON_GPU = 4096  # invocations of a batch on a GPU
GPU_PART = 0.6  # of the memory that is free before any judgement, for inputs and outputs of a batch of both


@dataclass(frozen=True)
class TimedPair:
    solution: Clocked
    reference: Clocked


@dataclass(frozen=True)
class Batch:
    """A run whose time counts. `outputs`: of invocations of it at random, which nobody knew while it ran."""

    seed: int
    outputs: dict[int, list[torch.Tensor]]


def time_both(ours: Batches, theirs: Batches, seconds: float, compare: Callable[[Batch], None]) -> TimedPair:
    """Time both in turns until the stop rule fires. `compare` looks at each of the Solution's batches, before the next
    run of it, and raises what is wrong with its outputs.
    """

    def take() -> float:
        mean, batch = ours.take()
        compare(batch)
        if len(theirs.samples_us) < FEWEST_OF_REFERENCE or sum(theirs.samples_us) * theirs.count / 1e6 < seconds:
            theirs.take()
        return mean

    sampled = sample_until(take, Budget(seconds, LIMIT_FACTOR * seconds), min_samples=FEWEST)
    ours.candidate.nothing()  # whether anything ran since the last batch is asked before a run
    return TimedPair(ours.clocked(sampled.rule), theirs.clocked(None))


@dataclass
class Batches:
    """A candidate's batches of `count` invocations, of `most` that one may have; `samples_us`: the mean time of each.
    `way_ns`: what the way to its process and back takes. `wrong`: whose fault it is where a run comes to nothing.
    """

    candidate: Candidate
    count: int
    most: int
    way_ns: float
    cache: Cache = "cold"
    wrong: Callable[[Status, str], Exception] = Rejected
    method: Method = "host"
    samples_us: list[float] = field(default_factory=list)

    def take(self) -> tuple[float, Batch]:
        """Run one batch: its mean time, and what of it is to be compared."""
        done = self.candidate.run(range(self.count), chosen=CHOSEN)
        check_report(done.report, self.wrong)
        self.method = protocol.METHODS[done.report.method % len(protocol.METHODS)]
        self.samples_us.append(done.elapsed_ns / self.count / 1e3)
        return self.samples_us[-1], Batch(done.seed, done.outputs)

    @property
    def long_enough(self) -> bool:
        """Whether they lasted two thirds of what they should, as far as memory goes."""
        lasted = median(self.samples_us) * self.count * 1e3
        return self.count >= self.most or 1.5 * lasted >= wanted_ns(self.candidate, self.way_ns)

    @property
    def right_count(self) -> int:
        """How many invocations last as long as a batch should, where nothing disturbs them."""
        return max(int(wanted_ns(self.candidate, self.way_ns) / (min(self.samples_us) * 1e3)) + 1, FEW)

    def clocked(self, rule: StopRule | None) -> Clocked:
        q1, middle, q3 = quartiles(self.samples_us)
        return Clocked(
            median_us=middle,
            q1_us=q1,
            q3_us=q3,
            samples_us=self.samples_us,
            n=self.count,
            stop=rule,
            method=self.method,
            cache=self.cache,
            way_us=self.way_ns / self.count / 1e3,
        )


def wanted_ns(candidate: Candidate, way: float) -> float:
    """What a batch should last."""
    return max(least_ns(candidate), way / WAY_SHARE)


def least_ns(candidate: Candidate) -> int:
    return GPU_BATCH_NS if candidate.limits.gpu else BATCH_NS


def bytes_each(candidate: Candidate, drawn: InputPool) -> int:
    """Of an invocation on a GPU: two candidates have its inputs and outputs there, and the judge what it draws."""
    outputs = 0 if candidate.destination else sum(result.bytes for result in drawn.results)
    return max(3 * drawn.bytes - outputs, 1)


def guess_count(theirs: Batches, first_ns: int) -> int:
    """How many invocations of a Solution may last as long as a batch should, by its first run: as many as of the
    reference, if it is not slower.
    """
    lasted = max(first_ns - theirs.way_ns, first_ns / MOST_GROWTH)
    return max(min(theirs.count, int(FEW * MOST_GUESSED * least_ns(theirs.candidate) / lasted)), FEW)


def size_batches(
    candidate: Candidate,
    drawn: InputPool,
    wrong: Callable[[Status, str], Exception] = Rejected,
    count: int = FEW,
    sure: bool = False,
) -> Batches:
    """Batches that last long enough, as far as memory goes. Opens `drawn` as it needs.

    `count`: how many invocations may be enough. `sure`: they were at another time, and on the CPU that is not tried
    again: see whether the Batches were `long_enough`.
    """
    ways = [candidate.nothing(CHOSEN) for _ in range(WAYS)]
    candidate.ways.extend(ways)
    way = max(sorted(candidate.ways)[len(candidate.ways) // 4], min(ways))  # it may have become longer for good
    wanted = wanted_ns(candidate, way)
    enough = LONG_ENOUGH * wanted

    def quickest(count: int) -> float:
        """Of two runs, or the first if that is too short: it may be disturbed, or the first to touch memory."""
        seed, lasted = fresh_seed(), math.inf
        for _ in range(2):
            done = candidate.run(range(count), seed)
            check_report(done.report, wrong)
            lasted = min(lasted, done.elapsed_ns)
            if lasted < enough:
                break
        return lasted

    most, least = candidate.most, FEW
    gpu, size = candidate.limits.gpu, max(drawn.bytes, 1)
    if gpu is not None:  # each invocation has a set of inputs of its own: together they should not fit the L2
        most = max(min(int(GPU_PART * gpu.memory) // bytes_each(candidate, drawn), MOST_ON_GPU), 2)
        least = max(min(-(-COLD_FACTOR * gpu.l2 // size), most), min(FEW, most))
    if count > FEW:
        count = min(count, most)
        candidate.open(drawn, count)
        if sure and gpu is None:
            return Batches(candidate, count, most, way, wrong=wrong)

    def fitting(lasted: float) -> int:
        each = max(lasted - way, lasted / MOST_GROWTH) / count
        return min(max(int(wanted / each) + 1, least), count * MOST_GROWTH, most)

    while ((lasted := quickest(count)) < enough and count < most) or count < least:
        count = fitting(lasted)
        candidate.open(drawn, count)
    cold = gpu is None or count * size >= COLD_FACTOR * gpu.l2
    count = min(count, fitting(lasted)) if gpu is None else count
    return Batches(candidate, count, most, way, "cold" if cold else "warm", wrong)

"""Times of a Solution and of the reference beside it, in turns, and how far the judge's own clock vouches for them.

Each sample of the clock is a batch of invocations with fresh inputs, asked for with a seed that nobody knew before. The
driver in the candidate's process reads the clock around each; the judge reads its own around the batch. What the
second has more than the first is the driver's work between invocations (filling inputs, copying outputs), and must be
what it is in the reference's process: there the same driver does the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from kcap.bench.judge import wire
from kcap.bench.judge.candidate import MOST_INVOCATIONS, Candidate, fresh_seed
from kcap.bench.judge.evidence import Refused, check
from kcap.bench.judge.wire import Answer
from kcap.replay.timing.stop import Budget, sample_until
from kcap.schemas.measurement import StopRule, quartiles
from kcap.schemas.outcome import Clocked

BATCH_NS = 5_000_000  # the least that a batch's invocations last, far above what a message takes
FEWEST_OF_REFERENCE = 3
LIMIT_FACTOR = 3  # sampling may take this many times the seconds asked for
SLACK_SHARE = 0.25  # of the driver's own work for an invocation: how much it may differ between two processes
SLACK_NS, SLACK_OF_TIME = 2_000, 0.05
STRAY_NS, STRAY_NS_THREADS, STRAY_OF_TIME = 3_000, 30_000, 0.05
PINGS = 5


@dataclass(frozen=True)
class Kept:
    """An invocation of which the outputs can still be asked for, from the batch just run."""

    seed: int
    number: int
    slot: int


@dataclass
class Batches:
    """A candidate's batches of `count` invocations."""

    candidate: Candidate
    count: int
    variants: int
    samples_us: list[float] = field(default_factory=list)
    between_ns: list[float] = field(default_factory=list)  # by invocation: the judge's clock less the driver's
    stray_ns: list[float] = field(default_factory=list)  # by invocation: other threads' CPU time between invocations

    def take(self, keep: int) -> tuple[float, list[Kept]]:
        """Run one batch, and keep the outputs of `keep` invocations chosen at random; its mean time."""
        seed = fresh_seed()
        chosen = sorted(secrets.SystemRandom().sample(range(self.count), min(keep, self.count)))
        answer = self.candidate.run(seed, self.count, chosen)
        check(answer)
        sample = self._mean_us(seed)
        self._account(answer)
        self.samples_us.append(sample)
        return sample, [Kept(seed, number, slot) for slot, number in enumerate(chosen)]

    def _mean_us(self, seed: int) -> float:
        """Of the invocations with the Workload's own index inputs; of all, where there are none of those."""
        times = self.candidate.times_ns(self.count)
        own = [time for i, time in enumerate(times) if wire.variant(seed, i, self.variants) == 0] or times
        if min(times) < 0:
            raise Refused("REWARD_HACK", "the clock in its process ran backwards")
        return sum(own) / len(own) / 1e3

    def _account(self, answer: Answer) -> None:
        total = sum(self.candidate.times_ns(self.count))
        self.between_ns.append((answer.wall_ns - total) / self.count)
        self.stray_ns.append(answer.stray_ns / self.count)

    def clocked(self, rule: StopRule | None, slack_ns: float | None) -> Clocked:
        q1, middle, q3 = quartiles(self.samples_us)
        return Clocked(
            median_us=middle,
            q1_us=q1,
            q3_us=q3,
            samples_us=self.samples_us,
            n=self.count,
            stop=rule,
            method="host",
            cache="warm",
            slack_us=None if slack_ns is None else slack_ns / 1e3,
        )


@dataclass(frozen=True)
class Times:
    solution: Clocked
    reference: Clocked


def batches(candidate: Candidate, variants: int, budget_s: float) -> Batches:
    """How many invocations make a batch: 5 ms of them, or what a tenth of `budget_s` allows."""
    check(candidate.run(fresh_seed(), 1))
    check(candidate.run(fresh_seed(), 2))
    each = max(min(candidate.times_ns(2)), 1)
    wanted = min(BATCH_NS, budget_s * 1e9 / 10)
    return Batches(candidate, min(max(int(wanted / each), 1), MOST_INVOCATIONS), variants)


def time_both(
    solution: Candidate,
    reference: Candidate,
    variants: int,
    seconds: float,
    keep: int,
    seen: Callable[[list[Kept]], None],
) -> Times:
    """Time both in turns until the stop rule fires. `seen` is told what is kept of each of the Solution's batches.

    Refused, where the driver saw something wrong, or the Solution's times cannot be.
    """
    ours, theirs = batches(solution, variants, seconds), batches(reference, variants, seconds)
    messages = ping_ns(reference)

    def take() -> float:
        sample, kept = ours.take(keep)
        seen(kept)
        spent = sum(theirs.samples_us) * theirs.count / 1e6
        if len(theirs.samples_us) < FEWEST_OF_REFERENCE or spent < seconds:
            theirs.take(keep)
        return sample

    sampled = sample_until(take, Budget(seconds, LIMIT_FACTOR * seconds))
    slack = vouch(ours, theirs, messages)
    check_strays(ours, theirs)
    return Times(ours.clocked(sampled.rule, slack), theirs.clocked(None, None))


def ping_ns(candidate: Candidate) -> float:
    """The judge's clock around a request for nothing."""
    return median(candidate.run(0, 0).wall_ns for _ in range(PINGS))


def vouch(ours: Batches, theirs: Batches, messages_ns: float) -> float:
    """To within how many nanoseconds of an invocation the judge's clock agrees; Refused, where it does not."""
    usual = max(median(theirs.between_ns) - messages_ns / theirs.count, 0.0)
    slack = SLACK_NS + SLACK_SHARE * usual + SLACK_OF_TIME * median(ours.samples_us) * 1e3
    hidden = min(ours.between_ns) - messages_ns / ours.count - usual
    if hidden > slack:
        said = median(ours.samples_us)
        reason = f"the clock in its process says {said:.3g} µs, the judge's {said + hidden / 1e3:.3g} µs an invocation"
        raise Refused("REWARD_HACK", reason)
    return slack


def check_strays(ours: Batches, theirs: Batches) -> None:
    """Refused, where other threads of its process were at work between its invocations."""
    least = STRAY_NS if ours.candidate.limits.threads == 1 else STRAY_NS_THREADS
    most = least + STRAY_OF_TIME * median(ours.samples_us) * 1e3 + median(theirs.stray_ns)
    if (stray := median(ours.stray_ns)) > most:
        reason = f"other threads of its process work between its invocations: {stray / 1e3:.3g} µs for each"
        raise Refused("REWARD_HACK", reason)

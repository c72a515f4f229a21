"""Times of a Solution and of the reference beside it, in turns, and how far the judge's own clock vouches for them.

Each sample of the clock is a batch of invocations with fresh inputs, asked for with a seed that nobody knew before. The
driver in the candidate's process times it; the judge reads its own clock around it. What the second has more than the
first is the driver's work between invocations (filling inputs, copying outputs), and must be what it is in the
reference's process: there the same driver does the same, for as many.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from kcap.bench.judge.batching import Batches, Kept, beside
from kcap.bench.judge.candidate import Candidate
from kcap.bench.judge.evidence import Refused, Undecided
from kcap.bench.judge.processors import Machine, used
from kcap.replay.timing.stop import LIMIT_FACTOR, Budget, Sampled, sample_until
from kcap.schemas.outcome import Clocked

FEWEST_OF_REFERENCE = 3
SLACK_SHARE = 0.25  # of the driver's own work for an invocation: how much it may differ between two processes
SLACK_NS, SLACK_OF_TIME = 2_000, 0.05
WAKING_NS = 150_000  # of a batch: what the judge may take to wake, which it does not in messages that follow at once
STRAY_NS, STRAY_NS_THREADS, STRAY_OF_TIME = 3_000, 30_000, 0.05
MORE_PROCESSORS = 0.1
MOST_IDLE = 0.1
PINGS = 5
RETRIES = 30
MOST_OTHERS = 0.25  # processors that others may have before a clock is no longer refused
FEWEST_VOUCHED = 3  # batches
MOST_HIDDEN = 2.0  # times what is said: CPU time beyond it, which others on a busy machine do not cause
FORGED = 0.2  # of the times that are vouched for: below it, noise explains no others


@dataclass(frozen=True)
class Times:
    solution: Clocked
    reference: Clocked


def time_both(ours: Batches, theirs: Batches, seconds: float, keep: int, seen: Callable[[list[Kept]], None]) -> Times:
    """Time both in turns until the stop rule fires. `seen` is told what is kept of each of the Solution's batches.

    Refused, where the driver saw something wrong, or the Solution's times cannot be; Undecided.
    """
    messages = ping_ns(theirs.candidate)
    before = Machine.now(ours.candidate.pid, theirs.candidate.pid)
    while True:
        driver = beside(ours, theirs)
        sampled = sample(ours, theirs, driver, seconds, keep, seen)
        slack = vouched(ours, driver, messages, before)
        said = median(ours.samples_us) * 1e3
        if not ours.grow(said, said + median(ours.between_ns)):  # whatever the first calls took
            break
    check_strays(ours, theirs)
    check_processors(ours)
    check_idle(ours.idle)
    check_idle(driver.idle)
    return Times(ours.clocked(sampled.rule, slack), theirs.clocked(None, None))


def sample(
    ours: Batches, theirs: Batches, driver: Batches, seconds: float, keep: int, seen: Callable[[list[Kept]], None]
) -> Sampled:
    """Batches of `ours`, in turns with those of the others as long as these are too few."""

    def take() -> float:
        mean, kept = ours.take(keep)
        seen(kept)
        spent = sum(theirs.samples_us) * theirs.count / 1e6
        if len(theirs.samples_us) < FEWEST_OF_REFERENCE or spent < seconds:
            ours.idle.append(meanwhile(ours, theirs))
        if driver.empty and len(driver.samples_us) < FEWEST_OF_REFERENCE:
            driver.idle.append(meanwhile(ours, driver))
        return mean

    return sample_until(take, Budget(seconds, LIMIT_FACTOR * seconds))


def meanwhile(ours: Batches, other: Batches) -> float:
    """Run one of the other's; how many processors those of `ours`, which nobody asks, use meanwhile."""
    began, before = time.perf_counter_ns(), used(ours.candidate.pid)
    other.take(0)
    return used(ours.candidate.pid).cpu(before) / (time.perf_counter_ns() - began)


def ping_ns(candidate: Candidate) -> float:
    """The judge's clock around a request for nothing."""
    return min(candidate.run(0, 0).wall_ns for _ in range(PINGS))


def vouched(ours: Batches, driver: Batches, messages_ns: float, before: Machine) -> float:
    """As `vouch`; before it is refused, it gets more batches: a busy machine disturbs some, and not all.

    Undecided, where others had so much of the machine since `before` that nothing can be told.
    """
    for _ in range(RETRIES):
        try:
            return vouch(ours, driver, messages_ns)
        except Refused:
            ours.take(0)
            driver.take(0)
    try:
        return vouch(ours, driver, messages_ns)
    except Refused:
        others = Machine.now(ours.candidate.pid, driver.candidate.pid).others(before)
        if others < MOST_OTHERS or betrayed(ours, driver):
            raise
        words = f"other processes had {others:.1f} processors of this machine"
        raise Undecided(f"its clock cannot be held against the judge's: {words}") from None


def vouch(ours: Batches, driver: Batches, messages_ns: float) -> float:
    """To within how many nanoseconds of an invocation the judge's clock agrees; Refused, where it does not.

    Each batch is vouched for by itself, and of `ours` those stay for which the clock vouches: what is said of the
    others counts nowhere. Nothing is excused in those: who waits for a core in an invocation waits by both clocks, and
    who waits between two only adds to the difference.
    """
    undisturbed = sorted(driver.between_ns)[len(driver.between_ns) // 4]
    usual = max(undisturbed - messages_ns / driver.count, 0.0)
    slack = SLACK_NS + SLACK_SHARE * usual + SLACK_OF_TIME * median(ours.samples_us) * 1e3 + WAKING_NS / ours.count
    hidden = [between - messages_ns / ours.count - usual for between in ours.between_ns]
    vouched = [one <= slack for one in hidden]
    said, least = median(ours.samples_us), min(FEWEST_VOUCHED, len(hidden))
    if sum(vouched) < least or _forged(ours.samples_us, vouched):
        reason = f"the clock in its process says {said:.3g} µs, the judge's {said + median(hidden) / 1e3:.3g} µs"
        raise Refused("REWARD_HACK", f"{reason} an invocation")
    ours.only(vouched)
    return slack


def betrayed(ours: Batches, driver: Batches) -> bool:
    """Whether it had far more CPU time than it says that it took, which no other process can make it have.

    Far more: than it says in all, and than the driver's own work.
    """
    if ours.candidate.limits.gpu is not None:
        return False
    work = max(median(driver.hidden_ns), 0.0)
    said = median(ours.samples_us) * 1e3
    return median(ours.hidden_ns) > MOST_HIDDEN * (said + work) + SLACK_NS + WAKING_NS / ours.count


def _forged(samples_us: list[float], vouched: list[bool]) -> bool:
    """Whether at least half of the batches are not vouched for, and said to be far quicker than those that are."""
    good = [one for one, fine in zip(samples_us, vouched, strict=True) if fine]
    bad = [one for one, fine in zip(samples_us, vouched, strict=True) if not fine]
    return len(bad) >= len(good) and median(bad) < FORGED * median(good)


def check_strays(ours: Batches, theirs: Batches) -> None:
    """Refused, where its process went on working when its invocations had returned."""
    least = STRAY_NS if ours.candidate.limits.threads == 1 else STRAY_NS_THREADS
    most = least + STRAY_OF_TIME * median(ours.samples_us) * 1e3 + median(theirs.stray_ns)
    if (stray := median(ours.stray_ns)) > most:
        reason = f"its process works on when an invocation has returned: {stray / 1e3:.3g} µs for each"
        raise Refused("REWARD_HACK", reason)


def check_processors(ours: Batches) -> None:
    """Refused, where its processes used more processors than they were given: in more than one batch, which no process
    that keeps to its cores can.
    """
    limits = ours.candidate.limits
    most = sorted(ours.processors)[-2:][0]
    if limits.gpu is None and most > limits.threads + MORE_PROCESSORS:
        reason = f"it used {most:.3g} processors at a time, and was given {limits.threads}"
        raise Refused("REWARD_HACK", reason)


def check_idle(idle: list[float]) -> None:
    """Refused, where its processes were at work while the reference was timed, or the driver there: that slows both."""
    if idle and (share := median(idle)) > MOST_IDLE:
        reason = f"its processes work while the reference is timed: {share:.0%} of a processor"
        raise Refused("REWARD_HACK", reason)

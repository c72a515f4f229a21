"""Times of a Solution and of the reference beside it, in turns, and how far the judge's own clock vouches for them.

Each sample of the clock is a batch of invocations with fresh inputs, asked for with a seed that nobody knew before. The
driver in the candidate's process times it; the judge reads its own clock around it. What the second has more than the
first is the driver's work between invocations (filling inputs, copying outputs), and must be what it is in the
reference's process: there the same driver does the same, for as many.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from statistics import median

from kcap.bench.judge.candidate import Candidate, fresh_seed
from kcap.bench.judge.driver import protocol
from kcap.bench.judge.driver.protocol import Answer
from kcap.bench.judge.input_pool import InputPool
from kcap.bench.judge.process import MachineCpuTime, cpu_time_of
from kcap.bench.judge.verdict import Rejected, Undecided, check_answer
from kcap.replay.timing.rotation import COLD_FACTOR
from kcap.replay.timing.sampling import LIMIT_FACTOR, Budget, Sampled, quartiles, sample_until
from kcap.schemas.results.measurement import Cache, Method, StopRule
from kcap.schemas.results.outcome import Clocked, Status

FEWEST_OF_REFERENCE = 3
SLACK_SHARE = 0.25  # of the driver's own work for an invocation: how much it may differ between two processes
SLACK_NS, SLACK_OF_TIME = 2_000, 0.05
WAKING_NS = 150_000  # of a batch: what the judge may take to wake, which it does not in messages that follow at once
STRAY_NS, STRAY_NS_THREADS, STRAY_OF_TIME = 3_000, 30_000, 0.05
MORE_PROCESSORS = 0.1
MOST_IDLE = 0.1
PINGS = 5
RETRIES = 30
MOST_OTHERS = 0.25  # processors that others may have before a clock is no longer rejected
FEWEST_VOUCHED = 3  # batches
MOST_HIDDEN = 2.0  # times what it claims: CPU time beyond it, which others on a busy machine do not cause
FORGED = 0.2  # of the times that are vouched for: below it, noise explains no others


@dataclass(frozen=True)
class TimedPair:
    solution: Clocked
    reference: Clocked


def time_both(
    ours: Batches, theirs: Batches, seconds: float, keep: int, seen: Callable[[list[KeptInvocation]], None]
) -> TimedPair:
    """Time both in turns until the stop rule fires. `seen` is told what is kept of each of the Solution's batches.

    Rejected, where the driver saw something wrong, or the Solution's times cannot be; Undecided.
    """
    messages = ping_ns(theirs.candidate)
    before = MachineCpuTime.now(ours.candidate.pid, theirs.candidate.pid)
    while True:
        driver = control_batches(ours, theirs)
        sampled = sample_in_turns(ours, theirs, driver, seconds, keep, seen)
        slack = cross_check_with_retries(ours, driver, messages, before)
        claimed_ns = median(ours.samples_us) * 1e3
        if not ours.grow(claimed_ns, claimed_ns + median(ours.between_ns)):  # whatever the first calls took
            break
    check_strays(ours, theirs)
    check_processors(ours)
    check_idle(ours.idle)
    check_idle(driver.idle)
    return TimedPair(ours.clocked(sampled.rule, slack), theirs.clocked(None, None))


def sample_in_turns(
    ours: Batches,
    theirs: Batches,
    driver: Batches,
    seconds: float,
    keep: int,
    seen: Callable[[list[KeptInvocation]], None],
) -> Sampled:
    """Batches of `ours`, in turns with those of the others as long as these are too few."""

    def take() -> float:
        mean, kept = ours.take(keep)
        seen(kept)
        spent = sum(theirs.samples_us) * theirs.count / 1e6
        if len(theirs.samples_us) < FEWEST_OF_REFERENCE or spent < seconds:
            ours.idle.append(load_while_other_runs(ours, theirs))
        if driver.empty and len(driver.samples_us) < FEWEST_OF_REFERENCE:
            driver.idle.append(load_while_other_runs(ours, driver))
        return mean

    return sample_until(take, Budget(seconds, LIMIT_FACTOR * seconds))


def load_while_other_runs(ours: Batches, other: Batches) -> float:
    """Run one of the other's; how many processors those of `ours`, which nobody asks, use meanwhile."""
    began, before = time.perf_counter_ns(), cpu_time_of(ours.candidate.pid)
    other.take(0)
    return cpu_time_of(ours.candidate.pid).cpu(before) / (time.perf_counter_ns() - began)


def ping_ns(candidate: Candidate) -> float:
    """The judge's clock around a request for nothing."""
    return min(candidate.run(0, 0).wall_ns for _ in range(PINGS))


def cross_check_with_retries(ours: Batches, driver: Batches, messages_ns: float, before: MachineCpuTime) -> float:
    """As `cross_check_clock`; before it is rejected, it gets more batches: a busy machine disturbs some, and not all.

    Undecided, where others had so much of the machine since `before` that nothing can be told.
    """
    for _ in range(RETRIES):
        try:
            return cross_check_clock(ours, driver, messages_ns)
        except Rejected:
            ours.take(0)
            driver.take(0)
    try:
        return cross_check_clock(ours, driver, messages_ns)
    except Rejected:
        others = MachineCpuTime.now(ours.candidate.pid, driver.candidate.pid).others(before)
        if others < MOST_OTHERS or has_excess_cpu_time(ours, driver):
            raise
        words = f"other processes had {others:.1f} processors of this machine"
        raise Undecided(f"its clock cannot be held against the judge's: {words}") from None


def cross_check_clock(ours: Batches, driver: Batches, messages_ns: float) -> float:
    """To within how many nanoseconds of an invocation the judge's clock agrees; Rejected, where it does not.

    Each batch is vouched for by itself, and of `ours` those stay for which the clock vouches: what is said of the
    others counts nowhere. Nothing is excused in those: who waits for a core in an invocation waits by both clocks, and
    who waits between two only adds to the difference.
    """
    undisturbed = sorted(driver.between_ns)[len(driver.between_ns) // 4]
    usual = max(undisturbed - messages_ns / driver.count, 0.0)
    slack = SLACK_NS + SLACK_SHARE * usual + SLACK_OF_TIME * median(ours.samples_us) * 1e3 + WAKING_NS / ours.count
    hidden = [between - messages_ns / ours.count - usual for between in ours.between_ns]
    vouched = [excess <= slack for excess in hidden]
    claimed_us, least = median(ours.samples_us), min(FEWEST_VOUCHED, len(hidden))
    if sum(vouched) < least or _forged(ours.samples_us, vouched):
        judged_us = claimed_us + median(hidden) / 1e3
        reason = f"the clock in its process says {claimed_us:.3g} µs, the judge's {judged_us:.3g} µs"
        raise Rejected("REWARD_HACK", f"{reason} an invocation")
    ours.only(vouched)
    return slack


def has_excess_cpu_time(ours: Batches, driver: Batches) -> bool:
    """Whether it had far more CPU time than it says that it took, which no other process can make it have.

    Far more: than it says in all, and than the driver's own work.
    """
    if ours.candidate.limits.gpu is not None:
        return False
    work = max(median(driver.hidden_ns), 0.0)
    claimed_ns = median(ours.samples_us) * 1e3
    return median(ours.hidden_ns) > MOST_HIDDEN * (claimed_ns + work) + SLACK_NS + WAKING_NS / ours.count


def _forged(samples_us: list[float], vouched: list[bool]) -> bool:
    """Whether at least half of the batches are not vouched for, and said to be far quicker than those that are."""
    good = [us for us, fine in zip(samples_us, vouched, strict=True) if fine]
    bad = [us for us, fine in zip(samples_us, vouched, strict=True) if not fine]
    return len(bad) >= len(good) and median(bad) < FORGED * median(good)


def check_strays(ours: Batches, theirs: Batches) -> None:
    """Rejected, where its process went on working when its invocations had returned."""
    least = STRAY_NS if ours.candidate.limits.threads == 1 else STRAY_NS_THREADS
    most = least + STRAY_OF_TIME * median(ours.samples_us) * 1e3 + median(theirs.stray_ns)
    if (stray := median(ours.stray_ns)) > most:
        reason = f"its process works on when an invocation has returned: {stray / 1e3:.3g} µs for each"
        raise Rejected("REWARD_HACK", reason)


def check_processors(ours: Batches) -> None:
    """Rejected, where its processes used more processors than they were given: in more than one batch, which no process
    that keeps to its cores can.
    """
    limits = ours.candidate.limits
    most = sorted(ours.processors)[-2:][0]
    if limits.gpu is None and most > limits.threads + MORE_PROCESSORS:
        reason = f"it used {most:.3g} processors at a time, and was given {limits.threads}"
        raise Rejected("REWARD_HACK", reason)


def check_idle(idle: list[float]) -> None:
    """Rejected, where its processes work while the reference is timed, or the driver there: that slows both."""
    if idle and (share := median(idle)) > MOST_IDLE:
        reason = f"its processes work while the reference is timed: {share:.0%} of a processor"
        raise Rejected("REWARD_HACK", reason)


HOST_BATCH_NS = 5_000_000  # the least that a batch's invocations last, far above what a message takes
GPU_BATCH_NS = 2_000_000
LEAST_GROWTH = 4  # times the invocations, where those of a batch turn out to last too short
MOST_WALL = 50  # a batch takes no longer than this many times the least, with all that the driver does
MOST_ON_GPU = 1024  # invocations in one graph
GPU_SHARE = 6  # of the free memory, one part in so many
RANDOM = secrets.SystemRandom()


@dataclass(frozen=True)
class KeptInvocation:
    """An invocation of the batch just run, of which the outputs are kept."""

    seed: int
    number: int


@dataclass
class Batches:
    """A candidate's batches of `count` invocations. Of each: its mean time in µs; and of its invocations' mean in ns,
    what the judge's clock has more than the driver's (`between_ns`), what the CPU time of a processor has more
    (`hidden_ns`), and how long other threads or streams of the process worked between invocations, before or after them
    (`stray_ns`). `processors`: how many its sandbox used, and `idle`: how many while another was asked. `wrong`: whose
    fault it is where the driver saw something wrong.

    `empty`: the driver does all that it does for them but the calls. `wanted_ns`: how long those of a batch should last
    at least; 0: as long as they do.
    """

    candidate: Candidate
    count: int
    wanted_ns: float = 0
    empty: bool = False
    cache: Cache = "warm"
    method: Method = "host"
    wrong: Callable[[Status, str], Exception] = Rejected
    samples_us: list[float] = field(default_factory=list)
    between_ns: list[float] = field(default_factory=list)
    hidden_ns: list[float] = field(default_factory=list)
    stray_ns: list[float] = field(default_factory=list)
    processors: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)

    def take(self, keep: int) -> tuple[float, list[KeptInvocation]]:
        """Run one batch; its mean time, and `keep` invocations at random, whose outputs are kept."""
        seed, chosen = fresh_seed(), RANDOM.sample(range(self.count), min(keep, self.count))
        answer = self.candidate.run(seed, self.count, keep=chosen, empty=self.empty)
        check_answer(answer, self.wrong)
        times = self.candidate.times_ns(self.count)
        if min(times) < 0:
            raise self.wrong("REWARD_HACK", "the clock in its process ran backwards")
        self._account(answer, times)
        if chosen:  # and with them one whose inputs are surely still there
            late = RANDOM.randrange(max(self.count - self.candidate.sets, 0), self.count)
            check_answer(self.candidate.deliver([*chosen, late]), self.wrong)
        return self.samples_us[-1], [KeptInvocation(seed, number) for number in chosen]

    def grow(self, each_ns: float, wall_ns: float, least: float = LEAST_GROWTH) -> bool:
        """Whether a batch should have `least` times as many invocations or more, if each takes `each_ns`: then it will
        have, and none so far counts. It has no more than can be waited for, if each takes `wall_ns`: a clock may lie.
        """
        each, wall = max(each_ns, 1), max(wall_ns, 1)
        count = min(max(int(min(1 / each, MOST_WALL / wall) * self.wanted_ns), 1), self.candidate.most)
        if count < least * self.count:
            return False
        self.count = count
        self.only([False] * len(self.samples_us))
        return True

    def _account(self, answer: Answer, times: list[int]) -> None:
        self.method = protocol.METHODS[answer.method % len(protocol.METHODS)]
        self.samples_us.append(sum(times) / len(times) / 1e3)
        self.between_ns.append((answer.wall_ns - sum(times)) / self.count)
        cpu = answer.processors * answer.wall_ns / self.candidate.limits.threads
        self.hidden_ns.append((cpu - sum(times)) / self.count)
        self.stray_ns.append(answer.stray_ns / self.count)
        self.processors.append(answer.processors)

    def only(self, chosen: Sequence[bool]) -> None:
        """Forget all batches but those that are `chosen`."""
        for kept in (self.samples_us, self.between_ns, self.hidden_ns, self.stray_ns):
            kept[:] = compress(kept, chosen)

    def clocked(self, rule: StopRule | None, slack_ns: float | None) -> Clocked:
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
            slack_us=None if slack_ns is None else slack_ns / 1e3,
        )


def size_batches(candidate: Candidate, drawn: InputPool, seconds: float) -> Batches:
    """Batches that last long enough, and no longer than a tenth of `seconds`."""
    check_answer(candidate.run(fresh_seed(), 1))
    if candidate.limits.gpu is None:
        return _on_host(candidate, seconds)
    check_answer(candidate.run(fresh_seed(), 2))
    return _on_gpu(candidate, drawn, max(min(candidate.times_ns(2)), 1))


def _on_host(candidate: Candidate, seconds: float) -> Batches:
    """As many as two invocations say, unless the batch of so many that touches its memory first says otherwise."""
    batches = Batches(candidate, 2, min(HOST_BATCH_NS, seconds * 1e9 / 10))
    for least in (0, LEAST_GROWTH):
        began = time.perf_counter_ns()
        batches.take(0)
        wall = (time.perf_counter_ns() - began) / batches.count
        batches.grow(min(candidate.times_ns(batches.count)), wall, least)
    return Batches(candidate, batches.count, batches.wanted_ns)


def control_batches(ours: Batches, theirs: Batches) -> Batches:
    """Those that show what the driver of `ours` takes beside the calls: as many invocations in the reference's process,
    and none of the reference, of which there may be so few that what a batch takes once would count as theirs.

    On a GPU they are the reference's own.
    """
    if ours.candidate.limits.gpu is not None:
        return theirs
    batches = Batches(theirs.candidate, ours.count, empty=True, wrong=theirs.wrong)
    if batches.count > theirs.count:  # memory that is touched for the first time
        check_answer(batches.candidate.run(fresh_seed(), batches.count, empty=True), batches.wrong)
    return batches


def _on_gpu(candidate: Candidate, drawn: InputPool, each_ns: int) -> Batches:
    """Every invocation of a batch has a set of inputs of its own: enough of them to last, and not to fit the L2."""
    gpu = candidate.limits.gpu
    assert gpu is not None
    size = max(drawn.bytes, 1)
    affordable = max(gpu.memory // GPU_SHARE // size, 1)
    wanted = max(GPU_BATCH_NS // each_ns, -(-COLD_FACTOR * gpu.l2 // size), 2)
    count = int(min(wanted, affordable, MOST_ON_GPU))
    candidate.open(drawn, count)
    check_answer(candidate.run(fresh_seed(), count))
    return Batches(candidate, count, cache="cold" if count * size >= COLD_FACTOR * gpu.l2 else "warm")

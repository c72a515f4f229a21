"""How many invocations make one sample of the clock, and that many run at a time."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress

from kcap.bench.judge import wire
from kcap.bench.judge.candidate import Candidate, fresh_seed
from kcap.bench.judge.draws import Draws
from kcap.bench.judge.evidence import Refused, check
from kcap.bench.judge.wire import Answer
from kcap.schemas.measurement import Cache, Method, StopRule, quartiles
from kcap.schemas.outcome import Clocked, Status

HOST_BATCH_NS = 5_000_000  # the least that a batch's invocations last, far above what a message takes
GPU_BATCH_NS = 2_000_000
LEAST_GROWTH = 4  # times the invocations, where those of a batch turn out to last too short
MOST_WALL = 50  # a batch takes no longer than this many times the least, with all that the driver does
COLD_FACTOR = 5  # how many times the L2 the inputs of a batch fill before they count as cold
MOST_ON_GPU = 1024  # invocations in one graph
GPU_SHARE = 6  # of the free memory, one part in so many
RANDOM = secrets.SystemRandom()


@dataclass(frozen=True)
class Kept:
    """An invocation of the batch just run, of which the outputs are kept."""

    seed: int
    number: int


@dataclass
class Batches:
    """A candidate's batches of `count` invocations. Of each: its mean time in µs; and of its invocations' mean in ns,
    what the judge's clock has more than the driver's (`between_ns`), what the CPU time of a processor has more
    (`hidden_ns`), and how long other threads or streams of the process worked between invocations, before or after them
    (`stray_ns`). `processors`: how many its cage used, and `idle`: how many while another was asked. `wrong`: whose
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
    wrong: Callable[[Status, str], Exception] = Refused
    samples_us: list[float] = field(default_factory=list)
    between_ns: list[float] = field(default_factory=list)
    hidden_ns: list[float] = field(default_factory=list)
    stray_ns: list[float] = field(default_factory=list)
    processors: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)

    def take(self, keep: int) -> tuple[float, list[Kept]]:
        """Run one batch; its mean time, and `keep` invocations at random, whose outputs are kept."""
        seed, chosen = fresh_seed(), RANDOM.sample(range(self.count), min(keep, self.count))
        answer = self.candidate.run(seed, self.count, keep=chosen, empty=self.empty)
        check(answer, self.wrong)
        times = self.candidate.times_ns(self.count)
        if min(times) < 0:
            raise self.wrong("REWARD_HACK", "the clock in its process ran backwards")
        self._account(answer, times)
        if chosen:  # and with them one whose inputs are surely still there
            late = RANDOM.randrange(max(self.count - self.candidate.sets, 0), self.count)
            check(self.candidate.deliver([*chosen, late]), self.wrong)
        return self.samples_us[-1], [Kept(seed, number) for number in chosen]

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
        self.method = wire.METHODS[answer.method % len(wire.METHODS)]
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


def batches(candidate: Candidate, drawn: Draws, seconds: float) -> Batches:
    """Batches that last long enough, and no longer than a tenth of `seconds`."""
    check(candidate.run(fresh_seed(), 1))
    if candidate.limits.gpu is None:
        return _on_host(candidate, seconds)
    check(candidate.run(fresh_seed(), 2))
    return _on_gpu(candidate, drawn, max(min(candidate.times_ns(2)), 1))


def _on_host(candidate: Candidate, seconds: float) -> Batches:
    """As many as two invocations say, unless the batch of so many that touches its memory first says otherwise."""
    made = Batches(candidate, 2, min(HOST_BATCH_NS, seconds * 1e9 / 10))
    for least in (0, LEAST_GROWTH):
        began = time.perf_counter_ns()
        made.take(0)
        wall = (time.perf_counter_ns() - began) / made.count
        made.grow(min(candidate.times_ns(made.count)), wall, least)
    return Batches(candidate, made.count, made.wanted_ns)


def beside(ours: Batches, theirs: Batches) -> Batches:
    """Those that show what the driver of `ours` takes beside the calls: as many invocations in the reference's process,
    and none of the reference, of which there may be so few that what a batch takes once would count as theirs.

    On a GPU they are the reference's own.
    """
    if ours.candidate.limits.gpu is not None:
        return theirs
    made = Batches(theirs.candidate, ours.count, empty=True, wrong=theirs.wrong)
    if made.count > theirs.count:  # memory that is touched for the first time
        check(made.candidate.run(fresh_seed(), made.count, empty=True), made.wrong)
    return made


def _on_gpu(candidate: Candidate, drawn: Draws, each_ns: int) -> Batches:
    """Every invocation of a batch has a set of inputs of its own: enough of them to last, and not to fit the L2."""
    gpu = candidate.limits.gpu
    assert gpu is not None
    size = max(drawn.bytes, 1)
    affordable = max(gpu.memory // GPU_SHARE // size, 1)
    wanted = max(GPU_BATCH_NS // each_ns, -(-COLD_FACTOR * gpu.l2 // size), 2)
    count = int(min(wanted, affordable, MOST_ON_GPU))
    candidate.open(drawn, count)
    check(candidate.run(fresh_seed(), count))
    return Batches(candidate, count, cache="cold" if count * size >= COLD_FACTOR * gpu.l2 else "warm")

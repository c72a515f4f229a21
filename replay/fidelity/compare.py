"""Engine against replay, for one kind of step and one state of the caches: rows, what is missing, totals, verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kcap.replay.fidelity.engine import GpuTime, KindSteps
from kcap.replay.fidelity.how import UNKNOWN, How
from kcap.schemas.recording import Call

TOTAL = 0.05  # how far the replayed kernels' sum may be from the engine's
KERNEL = 0.10  # and one kernel's time, where it has more than the
SHARE = 0.02  # of the step's GPU time
EXACT = 1e-9  # of rounding

NOT_COUNTED = "how often it ran is not known: its step's Program does not have it"
NOT_REPLAYED = "not replayed"


@dataclass(frozen=True)
class Replayed:
    """One invocation of a Call, replayed: the microseconds of its kernels, or why there are none.

    `names`: of its kernels. `sample`, `context`: as in kcap.replay.fidelity.nearest.Nearest.
    """

    us: float | None = None
    reason: str = NOT_REPLAYED
    names: frozenset[str] = frozenset()
    sample: int | None = None
    context: float | None = None
    how: How = UNKNOWN


@dataclass(frozen=True)
class Row:
    """A Call in a step of this kind: how often it runs, and its time in the engine and replayed, for all of these.

    `share`: of the step's GPU time. `other`: the kernels replayed have none of the names that the engine's had.
    """

    call: Call
    count: float
    engine_us: float
    replayed: Replayed
    share: float
    other: bool = False

    @property
    def replayed_us(self) -> float:
        return self.count * (self.replayed.us or 0.0)

    @property
    def ratio(self) -> float | None:
        """Replayed over engine; None where the engine's GPU spent nothing on it."""
        return self.replayed_us / self.engine_us if self.engine_us else None

    @property
    def judged(self) -> bool:
        return self.share > SHARE

    @property
    def within(self) -> bool:
        return self.ratio is not None and abs(self.ratio - 1) <= KERNEL + EXACT


@dataclass(frozen=True)
class Missing:
    """Time of the engine's GPU that nothing was replayed for; per step, as in Row. `call` None: it is of no Call.

    `replayed`: what came of trying.
    """

    name: str
    count: float
    engine_us: float
    share: float
    call: Call | None = None
    replayed: Replayed = Replayed()

    @property
    def reason(self) -> str:
        return self.replayed.reason


@dataclass(frozen=True)
class Compared:
    """The Calls of one kind of step in one state, replayed. Times are microseconds of one step."""

    state: str
    rows: list[Row]
    missing: list[Missing]

    @property
    def engine_us(self) -> float:
        """All that the GPU ran, what is missing too."""
        return sum(row.engine_us for row in self.rows) + self.missing_us

    @property
    def missing_us(self) -> float:
        return sum(one.engine_us for one in self.missing)

    @property
    def replayed_us(self) -> float:
        return sum(row.replayed_us for row in self.rows)

    @property
    def difference_us(self) -> float:
        """What the replay adds up to, less the engine's time of the same Calls."""
        return self.replayed_us - sum(row.engine_us for row in self.rows)

    @property
    def error(self) -> float:
        """How far the sum is off, over the engine's time: what is missing counts as wrong, whatever the difference."""
        return share_of(abs(self.difference_us) + self.missing_us, self.engine_us)

    def outside(self) -> Iterator[str]:
        """What is not within the bounds, in words; nothing where this state holds."""
        if self.error > TOTAL + EXACT:
            yield f"{self.state}: in total {self.error:.1%} off, {TOTAL:.0%} allowed"
        for row in self.rows:
            if row.judged and not row.within:
                name = f"{row.call.operator} ({row.share:.1%} of the time)"
                yield f"{self.state}: {name} takes {row.ratio or 0:.1%} of its time in the engine"
        for one in self.missing:
            if one.share > SHARE:
                yield f"{self.state}: {one.name} ({one.share:.1%} of the time) is missing: {one.reason}"


def share_of(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def compare(engine: KindSteps, calls: Mapping[int, Call], replayed: Mapping[int, Replayed], state: str) -> Compared:
    """Hold a kind of step against the replay of its Calls (both by id).

    A Call that the engine's GPU spent nothing on is a row only where its replay has kernels.
    """
    rows = sorted(_rows(engine, calls, replayed), key=lambda row: (-row.engine_us, -row.replayed_us, row.call.id))
    missing = sorted(_missing(engine, calls, replayed), key=lambda one: (-one.engine_us, one.name, one.reason))
    return Compared(state, rows, missing)


def _rows(engine: KindSteps, calls: Mapping[int, Call], replayed: Mapping[int, Replayed]) -> Iterator[Row]:
    for number, count in engine.invocations.items():
        one, in_engine = replayed.get(number, Replayed()), engine.by_call.get(number, GpuTime())
        if one.us is None or not (one.us or in_engine.us):
            continue
        other = calls[number].launch is None and bool(in_engine.names) and not in_engine.names & one.names
        us = in_engine.us / len(engine.steps)
        yield Row(calls[number], count / len(engine.steps), us, one, share_of(in_engine.us, engine.gpu_us), other)


def _missing(engine: KindSteps, calls: Mapping[int, Call], replayed: Mapping[int, Replayed]) -> Iterator[Missing]:
    def of(name: str, one: Replayed, count: float, time: GpuTime, call: Call | None = None) -> Missing:
        steps = len(engine.steps)
        share = share_of(time.us, engine.gpu_us)
        return Missing(name, count / steps, time.us / steps, share, call, one)

    for (name, reason), time in engine.of_no_call.items():
        yield of(name, Replayed(reason=reason), time.kernels, time)
    for number, time in engine.by_call.items():
        count = engine.invocations[number]
        one = replayed.get(number, Replayed()) if count else Replayed(reason=NOT_COUNTED)
        if one.us is None:
            yield of(calls[number].operator, one, count or time.kernels, time, calls[number])

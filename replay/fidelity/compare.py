"""Engine against replay, for one kind of step and one state of the caches: rows, what is missing, totals, verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kcap.replay.fidelity.engine import GpuTime, KindSteps
from kcap.schemas.recording.recording import Call
from kcap.schemas.results.measurement import DROPPED, Cache, Measurement, Method, ProgramMeasurement, StopRule


@dataclass(frozen=True)
class Provenance:
    """As in a Measurement. `slow_samples`: how many of the clock's `samples` are not in the median."""

    method: Method | None = None
    cache: Cache | None = None
    stop: StopRule | None = None
    samples: int = 0
    slow_samples: int = 0
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, one: Measurement | ProgramMeasurement) -> Provenance:
        return cls(one.method, one.cache, one.stop, len(one.samples_us), len(one.slow_samples), tuple(one.notes))

    @property
    def warm(self) -> bool:
        """Whether the GPU found its inputs in the caches, though the state asked for was `serving`."""
        return self.cache == "warm" and self.method not in ("none", "host")

    @property
    def remarks(self) -> list[str]:
        """The notes, each once and without the number of samples, which differs from Call to Call."""
        return list(dict.fromkeys(DROPPED if note.endswith(DROPPED) else note for note in self.notes))


UNKNOWN_PROVENANCE = Provenance()


TOTAL_BOUND = 0.05  # how far the replayed kernels' sum may be from the engine's


KERNEL_BOUND = 0.10  # and one kernel's time, where it has more than the


KERNEL_SHARE = 0.02  # of the step's GPU time


ROUNDING = 1e-9  # of rounding


NOT_COUNTED = "how often it ran is not known: its step's Program does not have it"


NOT_REPLAYED = "not replayed"


@dataclass(frozen=True)
class ReplayedCall:
    """One invocation of a Call, replayed: the microseconds of its kernels, or why there are none.

    `names`: of its kernels. `sample`, `context`: as in kcap.replay.fidelity.replaying.NearestSample.
    """

    us: float | None = None
    reason: str = NOT_REPLAYED
    names: frozenset[str] = frozenset()
    sample: int | None = None
    context: float | None = None
    how: Provenance = UNKNOWN_PROVENANCE


@dataclass(frozen=True)
class ComparedCall:
    """A Call in a step of this kind: how often it runs, and its time in the engine and replayed, for all of these.

    `share`: of the step's GPU time. `other`: the kernels replayed have none of the names that the engine's had.
    """

    call: Call
    count: float
    engine_us: float
    replayed: ReplayedCall
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
        return self.share > KERNEL_SHARE

    @property
    def within(self) -> bool:
        return self.ratio is not None and abs(self.ratio - 1) <= KERNEL_BOUND + ROUNDING


@dataclass(frozen=True)
class MissingCall:
    """Time of the engine's GPU that nothing was replayed for; per step, as in Row. `call` None: it is of no Call.

    `replayed`: what came of trying.
    """

    name: str
    count: float
    engine_us: float
    share: float
    call: Call | None = None
    replayed: ReplayedCall = ReplayedCall()

    @property
    def reason(self) -> str:
        return self.replayed.reason


@dataclass(frozen=True)
class ComparedStep:
    """The Calls of one kind of step in one state, replayed. Times are microseconds of one step."""

    state: str
    rows: list[ComparedCall]
    missing: list[MissingCall]

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
        if self.error > TOTAL_BOUND + ROUNDING:
            yield f"{self.state}: in total {self.error:.1%} off, {TOTAL_BOUND:.0%} allowed"
        for row in self.rows:
            if row.judged and not row.within:
                name = f"{row.call.operator} ({row.share:.1%} of the time)"
                yield f"{self.state}: {name} takes {row.ratio or 0:.1%} of its time in the engine"
        for one in self.missing:
            if one.share > KERNEL_SHARE:
                yield f"{self.state}: {one.name} ({one.share:.1%} of the time) is missing: {one.reason}"


def share_of(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def compare(
    engine: KindSteps, calls: Mapping[int, Call], replayed: Mapping[int, ReplayedCall], state: str
) -> ComparedStep:
    """Hold a kind of step against the replay of its Calls (both by id).

    A Call that the engine's GPU spent nothing on is a row only where its replay has kernels.
    """
    rows = sorted(_rows(engine, calls, replayed), key=lambda row: (-row.engine_us, -row.replayed_us, row.call.id))
    missing = sorted(_missing(engine, calls, replayed), key=lambda one: (-one.engine_us, one.name, one.reason))
    return ComparedStep(state, rows, missing)


def _rows(engine: KindSteps, calls: Mapping[int, Call], replayed: Mapping[int, ReplayedCall]) -> Iterator[ComparedCall]:
    for number, count in engine.invocations.items():
        one, in_engine = replayed.get(number, ReplayedCall()), engine.by_call.get(number, GpuTime())
        if one.us is None or not (one.us or in_engine.us):
            continue
        other = calls[number].launch is None and bool(in_engine.names) and not in_engine.names & one.names
        us = in_engine.us / len(engine.steps)
        yield ComparedCall(
            calls[number], count / len(engine.steps), us, one, share_of(in_engine.us, engine.gpu_us), other
        )


def _missing(
    engine: KindSteps, calls: Mapping[int, Call], replayed: Mapping[int, ReplayedCall]
) -> Iterator[MissingCall]:
    def of(name: str, one: ReplayedCall, count: float, time: GpuTime, call: Call | None = None) -> MissingCall:
        steps = len(engine.steps)
        share = share_of(time.us, engine.gpu_us)
        return MissingCall(name, count / steps, time.us / steps, share, call, one)

    for (name, reason), time in engine.of_no_call.items():
        yield of(name, ReplayedCall(reason=reason), time.kernels, time)
    for number, time in engine.by_call.items():
        count = engine.invocations[number]
        one = replayed.get(number, ReplayedCall()) if count else ReplayedCall(reason=NOT_COUNTED)
        if one.us is None:
            yield of(calls[number].operator, one, count or time.kernels, time, calls[number])

"""The engine compared with the replay, for one kind of step in one cache state: rows, missing time, totals, bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kcap.replay.fidelity.engine import GpuTime, KindSteps
from kcap.schemas.recording.recording import Call
from kcap.schemas.results.measurement import DROPPED, Cache, Measurement, Method, ProgramMeasurement, StopRule


@dataclass(frozen=True)
class Provenance:
    """How a time was measured, as in a Measurement. `slow_samples`: of `samples`, those not in the median."""

    method: Method | None = None
    cache: Cache | None = None
    stop: StopRule | None = None
    samples: int = 0
    slow_samples: int = 0
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, measurement: Measurement | ProgramMeasurement) -> Provenance:
        return cls(
            measurement.method,
            measurement.cache,
            measurement.stop,
            len(measurement.samples_us),
            len(measurement.slow_samples),
            tuple(measurement.notes),
        )

    @property
    def warm(self) -> bool:
        """Whether the inputs were in the caches, though the state asked for was `serving`."""
        return self.cache == "warm" and self.method not in ("none", "host")

    @property
    def distinct_notes(self) -> list[str]:
        """The notes, each once, without the number of samples, which differs from Call to Call."""
        return list(dict.fromkeys(DROPPED if note.endswith(DROPPED) else note for note in self.notes))


UNKNOWN_PROVENANCE = Provenance()
TOTAL_BOUND = 0.05  # how far the sum of the replayed kernels may be from the engine's,
KERNEL_BOUND = 0.10  # and the time of one kernel, if it has more than
KERNEL_SHARE = 0.02  # of the step's GPU time
ROUNDING = 1e-9
NOT_COUNTED = "how often it ran is not known: its step's Program does not have it"
NOT_REPLAYED = "not replayed"


@dataclass(frozen=True)
class ReplayedCall:
    """One invocation of a Call, replayed: the microseconds of its kernels, or the reason why there are none.

    `names`: of its kernels. `sample`, `context`, `sequences`: as in kcap.replay.fidelity.replaying.NearestSample.
    """

    us: float | None = None
    reason: str = NOT_REPLAYED
    names: frozenset[str] = frozenset()
    sample: int | None = None
    context: float | None = None
    sequences: int | None = None
    provenance: Provenance = UNKNOWN_PROVENANCE


@dataclass(frozen=True)
class ComparedCall:
    """A Call in a step of this kind: its invocations, and their time in the engine and replayed.

    `share`: of the step's GPU time. `other`: none of the replayed kernels has the name of one of the engine's.
    `beside`: the part of its time in the engine in which kernels of other Calls ran, too.
    """

    call: Call
    count: float
    engine_us: float
    replayed: ReplayedCall
    share: float
    other: bool = False
    beside: float = 0.0

    @property
    def replayed_us(self) -> float:
        return self.count * (self.replayed.us or 0.0)

    @property
    def ratio(self) -> float | None:
        """Replayed over engine; None where the engine's GPU spent nothing on it."""
        return self.replayed_us / self.engine_us if self.engine_us else None

    @property
    def judged(self) -> bool:
        """Not where it shared the GPU: nothing says how long it would have taken alone."""
        return self.share > KERNEL_SHARE and self.beside <= KERNEL_BOUND

    @property
    def within(self) -> bool:
        return self.ratio is not None and abs(self.ratio - 1) <= KERNEL_BOUND + ROUNDING


@dataclass(frozen=True)
class MissingCall:
    """GPU time of the engine for which nothing was replayed, per step. `call` None: it belongs to no Call.

    `replayed`: the result of the attempt.
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
    """The Calls of one kind of step, replayed in one state. Times are microseconds of one step.

    `overlap_us`: by how much the sum of the engine's kernels exceeds the time in which any of them ran.
    """

    state: str
    rows: list[ComparedCall]
    missing: list[MissingCall]
    overlap_us: float = 0.0

    @property
    def engine_us(self) -> float:
        """All of the GPU's work, with what is missing."""
        return sum(row.engine_us for row in self.rows) + self.missing_us

    @property
    def missing_us(self) -> float:
        return sum(missing.engine_us for missing in self.missing)

    @property
    def replayed_us(self) -> float:
        return sum(row.replayed_us for row in self.rows)

    @property
    def difference_us(self) -> float:
        """The sum of the replay minus the engine's time for the same Calls.

        Kernels that ran side by side took longer than they do alone: their sum may be replayed in less, down to the
        time in which any of them ran.
        """
        difference = self.replayed_us - sum(row.engine_us for row in self.rows)
        return difference if difference > 0 else min(difference + self.overlap_us, 0.0)

    @property
    def error(self) -> float:
        """The error of the sum over the engine's time; what is missing counts in full as error."""
        return share_of(abs(self.difference_us) + self.missing_us, self.engine_us)

    def violations(self) -> Iterator[str]:
        """Descriptions of what is outside the bounds; none if this state is within them."""
        if self.error > TOTAL_BOUND + ROUNDING:
            yield f"{self.state}: in total {self.error:.1%} off, {TOTAL_BOUND:.0%} allowed"
        for row in self.rows:
            if row.judged and not row.within:
                name = f"{row.call.operator} ({row.share:.1%} of the time)"
                yield f"{self.state}: {name} takes {row.ratio or 0:.1%} of its time in the engine"
        for missing in self.missing:
            if missing.share > KERNEL_SHARE:
                yield f"{self.state}: {missing.name} ({missing.share:.1%} of the time) is missing: {missing.reason}"


def share_of(part: float, total: float) -> float:
    return part / total if total else 0.0


def compare(
    engine: KindSteps, calls: Mapping[int, Call], replayed: Mapping[int, ReplayedCall], state: str
) -> ComparedStep:
    """Compare a kind of step with the replay of its Calls (both by id).

    A Call without GPU time in the engine is a row only if its replay has kernels.
    """
    rows = sorted(_rows(engine, calls, replayed), key=lambda row: (-row.engine_us, -row.replayed_us, row.call.id))
    missing = sorted(
        _missing(engine, calls, replayed),
        key=lambda missing_call: (-missing_call.engine_us, missing_call.name, missing_call.reason),
    )
    return ComparedStep(state, rows, missing, engine.overlap_us / len(engine.steps))


def _rows(engine: KindSteps, calls: Mapping[int, Call], replayed: Mapping[int, ReplayedCall]) -> Iterator[ComparedCall]:
    for number, count in engine.invocations.items():
        replay, in_engine = replayed.get(number, ReplayedCall()), engine.by_call.get(number, GpuTime())
        if replay.us is None or not (replay.us or in_engine.us):
            continue
        other = calls[number].launch is None and bool(in_engine.names) and not in_engine.names & replay.names
        us, beside = in_engine.us / len(engine.steps), share_of(in_engine.shared_us, in_engine.us)
        share = share_of(in_engine.us, engine.gpu_us)
        yield ComparedCall(calls[number], count / len(engine.steps), us, replay, share, other, beside)


def _missing(
    engine: KindSteps, calls: Mapping[int, Call], replayed: Mapping[int, ReplayedCall]
) -> Iterator[MissingCall]:
    def missing_call(
        name: str, replay: ReplayedCall, count: float, time: GpuTime, call: Call | None = None
    ) -> MissingCall:
        steps = len(engine.steps)
        share = share_of(time.us, engine.gpu_us)
        return MissingCall(name, count / steps, time.us / steps, share, call, replay)

    for (name, reason), time in engine.of_no_call.items():
        yield missing_call(name, ReplayedCall(reason=reason), time.kernels, time)
    for number, time in engine.by_call.items():
        count = engine.invocations[number]
        replay = replayed.get(number, ReplayedCall()) if count else ReplayedCall(reason=NOT_COUNTED)
        if replay.us is None:
            yield missing_call(calls[number].operator, replay, count or time.kernels, time, calls[number])

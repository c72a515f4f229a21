"""All kinds of profiled steps: does the replay add up to what the engine's GPU did?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from kcap.replay.fidelity.compare import ROUNDING, TOTAL_BOUND, UNKNOWN_PROVENANCE, ComparedStep, Provenance, share_of
from kcap.replay.fidelity.engine import KindSteps, Span, StepKind

SPAN_BOUND = 0.10  # how far a Program's back-to-back time may be from the span that the GPU took by itself
SERVING, PROGRAM = "serving", "Program"  # each Call alone, its caches as in serving; the Calls in their order


@dataclass(frozen=True)
class ProgramTime:
    """A Program replayed as a whole, in microseconds; `us` None: it was not, for `reason`.

    `left_out`: of its kernels' `invocations`. `unmatched_us`: of its kernels' durations, what no Call could be given.
    `stretches`: the CUDA graphs that it took. `sm_mhz`: the GPU's clock after it.
    """

    us: float | None = None
    reason: str = ""
    program: int | None = None
    invocations: int = 0
    left_out: int = 0
    unmatched_us: float = 0.0
    stretches: int = 0
    how: Provenance = UNKNOWN_PROVENANCE
    sm_mhz: int | None = None


@dataclass(frozen=True)
class KindFidelity:
    """One kind of step, `steps` of which were profiled, in both states; times are microseconds of one step.

    `sm_mhz`: the clock that the engine's GPU had in them.
    """

    kind: StepKind
    steps: int
    serving: ComparedStep
    in_program: ComparedStep
    span: Span | None
    program: ProgramTime
    sm_mhz: float | None = None

    @classmethod
    def of(
        cls, engine: KindSteps, serving: ComparedStep, in_program: ComparedStep, program: ProgramTime
    ) -> KindFidelity:
        return cls(engine.kind, len(engine.steps), serving, in_program, engine.span, program, engine.sm_mhz)

    @property
    def span_ratio(self) -> float | None:
        """The Program's back-to-back time over what the GPU took by itself."""
        if self.span is None or self.program.us is None or self.span.own_us <= 0:
            return None
        return self.program.us / self.span.own_us

    @cached_property
    def holding(self) -> list[ComparedStep]:
        """The states that hold; what serves first. One is enough."""
        return [state for state in (self.serving, self.in_program) if not any(state.outside())]

    @cached_property
    def best(self) -> ComparedStep:
        """The first state that holds, or else the one that is closer in total: what the total of all kinds takes."""
        return next(iter(self.holding), min(self.serving, self.in_program, key=lambda state: state.error))

    def outside(self) -> Iterator[str]:
        """What is not within the bounds, in words; nothing where one of the states holds, and the span."""
        if not self.holding:
            yield from self.serving.outside()
            yield from self.in_program.outside()
        yield from self._span_outside()

    def _span_outside(self) -> Iterator[str]:
        if self.program.us is None:
            yield f"the Program was not replayed as a whole: {self.program.reason}"
        elif self.span_ratio is None:
            yield "the step's span is not known: kernels have no start before format 1.3, record anew"
        elif abs(self.span_ratio - 1) > SPAN_BOUND + ROUNDING:
            yield f"the Program takes {self.span_ratio:.1%} of the step's span, {SPAN_BOUND:.0%} off are allowed"


@dataclass(frozen=True)
class Fidelity:
    """All kinds of steps, most GPU time first. Times are microseconds over all profiled steps."""

    kinds: list[KindFidelity]

    def engine_us(self) -> float:
        return sum(each.steps * each.serving.engine_us for each in self.kinds)

    def replayed_us(self) -> float:
        return sum(each.steps * each.best.replayed_us for each in self.kinds)

    def missing_us(self) -> float:
        return sum(each.steps * each.best.missing_us for each in self.kinds)

    def by_state(self) -> Counter[str]:
        """By which state how many kinds are in these totals."""
        return Counter(each.best.state for each in self.kinds)

    @property
    def error(self) -> float:
        """As Compared.error, each kind of step weighing as often as it was profiled."""
        difference = sum(each.steps * each.best.difference_us for each in self.kinds)
        return share_of(abs(difference) + self.missing_us(), self.engine_us())

    @property
    def holds(self) -> bool:
        return self.error <= TOTAL_BOUND + ROUNDING and not any(any(each.outside()) for each in self.kinds)

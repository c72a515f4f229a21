"""All kinds of profiled steps: does the replay add up to the time of the engine's GPU?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from kcap.replay.fidelity.compare import ROUNDING, TOTAL_BOUND, UNKNOWN_PROVENANCE, ComparedStep, Provenance, share_of
from kcap.replay.fidelity.engine import KindSteps, Span, StepKind
from kcap.replay.timing.sampling import holds_host_time

SPAN_BOUND = 0.10  # how far a Program's back-to-back time may be from the span of the GPU's own work
SERVING, PROGRAM = "serving", "Program"  # each Call alone in this cache state; the Calls in order


@dataclass(frozen=True)
class ProgramTime:
    """A Program replayed as a whole, in microseconds, without waits for other ranks; `us` None: it was not, for
    `reason`.

    `left_out`: of its kernels' `invocations`. `unmatched_us`: of its kernels' durations, those attributed to no Call.
    `stretches`: the number of CUDA graphs. `sm_mhz`: the GPU's clock after it.
    """

    us: float | None = None
    reason: str = ""
    program: int | None = None
    invocations: int = 0
    left_out: int = 0
    unmatched_us: float = 0.0
    stretches: int = 0
    provenance: Provenance = UNKNOWN_PROVENANCE
    sm_mhz: int | None = None


@dataclass(frozen=True)
class KindFidelity:
    """One kind of step, `steps` of which were profiled, in both states; times are microseconds of one step.

    `sm_mhz`: the clock of the engine's GPU in them.
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
        """The Program's back-to-back time over the span of the GPU's own work."""
        if self.span is None or self.program.us is None or self.span.own_us <= 0:
            return None
        return self.program.us / self.span.own_us

    @cached_property
    def states_within_bounds(self) -> list[ComparedStep]:
        """The states within the bounds, `serving` first. One is enough."""
        return [state for state in (self.serving, self.in_program) if not any(state.violations())]

    @cached_property
    def best(self) -> ComparedStep:
        """The state that counts in the total of all kinds: the first within the bounds, else the closer in total."""
        return next(iter(self.states_within_bounds), min(self.serving, self.in_program, key=lambda state: state.error))

    def violations(self) -> Iterator[str]:
        """Descriptions of what is outside the bounds; none if one of the states and the span are within them."""
        if not self.states_within_bounds:
            yield from self.serving.violations()
            yield from self.in_program.violations()
        yield from self._span_violations()

    def _span_violations(self) -> Iterator[str]:
        if self.program.us is None:
            yield f"the Program was not replayed as a whole: {self.program.reason}"
        elif self.span_ratio is None:
            yield "the step's span is not known: kernels have no start before format 1.3, record anew"
        elif self.span_ratio > 1 and holds_host_time(self.program.provenance.notes):
            return  # the span has no such waits
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
        """How many kinds are in these totals by each state."""
        return Counter(each.best.state for each in self.kinds)

    @property
    def error(self) -> float:
        """As ComparedStep.error, each kind of step weighted by its profiled steps."""
        difference = sum(each.steps * each.best.difference_us for each in self.kinds)
        return share_of(abs(difference) + self.missing_us(), self.engine_us())

    @property
    def holds(self) -> bool:
        return self.error <= TOTAL_BOUND + ROUNDING and not any(any(each.violations()) for each in self.kinds)

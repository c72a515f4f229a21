"""What Solutions gained in the engine: paired differences of step times, beside what the judge's times predict.

Some blocks of steps are one of every arm, in random order. For steps of one phase and number of sequences the median
of an arm's block is set against the engine's in the same blocks; the mean of these differences has the interval of
Student's t at 95 %. What the control differs by says how far a difference may be chance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from kcap.bench.apply.arms import CONTROL, ENGINE, Arm, Schedule, TimedStep
from kcap.schemas.results.plan import Plan

Kind = tuple[str, int]  # phase, sequences
FEWEST = 3  # pairs that an interval is made of


@dataclass(frozen=True)
class Difference:
    """Microseconds a step, less than none where it is faster: the mean of `pairs`, and half of its 95 % interval (None
    for fewer pairs than FEWEST)."""

    us: float
    half: float | None
    pairs: int

    @property
    def is_chance(self) -> bool:
        """Whether the interval holds 0, or there is none."""
        return self.half is None or abs(self.us) <= self.half


@dataclass(frozen=True)
class Compared:
    """Steps of one kind, of which there are so many in all three arms.

    `us`: the mean of the engine's own; `predicted_us`: of a step with Solutions, less than none where it should be
    faster; `held`: the share of steps of their arm that ran a Solution.
    """

    phase: str
    sequences: int
    steps: int
    us: float
    solutions: Difference | None
    control: Difference | None
    predicted_us: float
    held: float

    def as_json(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "sequences": self.sequences,
            "steps": self.steps,
            "engine_us": self.us,
            "solutions": _difference_as_json(self.solutions),
            "control": _difference_as_json(self.control),
            "predicted_us": self.predicted_us,
            "held": self.held,
        }


def _difference_as_json(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    return {"us": difference.us, "half_interval_us": difference.half, "pairs": difference.pairs}


def compare(plan: Plan, arm: Arm, steps: Iterable[TimedStep], schedule: Schedule) -> list[Compared]:
    """The plan of `arm` against the engine's own kernels, of the steps of one rank: those kinds first that took most
    time. The first step of a block stays out: it follows one of another arm."""
    kinds: dict[Kind, list[TimedStep]] = defaultdict(list)
    for step in steps:
        if not step.first and step.arm in (ENGINE, CONTROL, arm):
            kinds[step.phase, step.sequences].append(step)
    found = [_compared(plan, arm, kind, of_kind, schedule) for kind, of_kind in kinds.items()]
    return sorted(found, key=lambda one: -one.us * one.steps)


def _compared(plan: Plan, arm: Arm, kind: Kind, steps: Sequence[TimedStep], schedule: Schedule) -> Compared:
    own, control, with_plan = ([step for step in steps if step.arm == each] for each in (ENGINE, CONTROL, arm))
    return Compared(
        *kind,
        steps=len(steps),
        us=fmean(step.us for step in own or steps),
        solutions=_difference(own, with_plan, schedule),
        control=_difference(own, control, schedule),
        predicted_us=fmean(_predicted(plan, step) for step in with_plan) if with_plan else 0.0,
        held=fmean(any(step.uses) for step in with_plan) if with_plan else 0.0,
    )


def _predicted(plan: Plan, step: TimedStep) -> float:
    """What the judge's times say that the Solutions that ran in the step change of its time."""
    saved = (one.saved_us(step.phase) for one in plan.replacements)
    return -sum(times * us for times, us in zip(step.uses, saved, strict=False))


def _difference(own: Sequence[TimedStep], other: Sequence[TimedStep], schedule: Schedule) -> Difference | None:
    """Of `other` from the engine's own, paired by the blocks that they are in; None without a pair."""
    ours, theirs = _by_group(own, schedule), _by_group(other, schedule)
    pairs = [theirs[group] - ours[group] for group in ours.keys() & theirs.keys()]
    if not pairs:
        return None
    return Difference(fmean(pairs), half_interval(pairs), len(pairs))


def _by_group(steps: Sequence[TimedStep], schedule: Schedule) -> dict[int, float]:
    groups: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        groups[schedule.group(step.index)].append(step.us)
    return {group: median(us) for group, us in groups.items()}


def half_interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean of `values`; None for fewer than FEWEST."""
    if len(values) < FEWEST:
        return None
    return student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))


T_95 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 12: 2.179,
    15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980,
}  # fmt: skip


def student_t(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t, of the next smaller number of degrees of freedom that is tabled."""
    return T_95[max(known for known in T_95 if known <= degrees)]

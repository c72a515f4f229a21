"""What Solutions gained in the engine: paired differences of step times, beside what the judge's times predict.

Some blocks of steps are one of every arm, in random order. For steps of one phase and number of sequences the median
of an arm's block is set against the engine's in the same blocks; the mean of these differences has the interval of
Student's t at 95 %. What the control differs by says how far a difference may be chance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev

from kcap.bench.apply.arms import Schedule, TimedStep
from kcap.bench.apply.graphs import CONTROL, ENGINE, Arm
from kcap.schemas.results.applied import Difference, StepsCompared
from kcap.schemas.results.plan import Plan

Kind = tuple[str, int]  # phase, sequences
FEWEST = 3  # pairs that an interval is made of


def compare(plan: Plan, arm: Arm, steps: Iterable[TimedStep], schedule: Schedule) -> list[StepsCompared]:
    """The plan of `arm` against the engine's own kernels, of the steps of one rank: those kinds first that took most
    time. The first step of a block stays out: it follows one of another arm."""
    kinds: dict[Kind, list[TimedStep]] = defaultdict(list)
    for step in steps:
        if not step.first and step.arm in (ENGINE, CONTROL, arm):
            kinds[step.phase, step.sequences].append(step)
    found = [_compared(plan, arm, kind, of_kind, schedule) for kind, of_kind in kinds.items()]
    return sorted(found, key=lambda one: -one.engine_us * one.steps)


def _compared(plan: Plan, arm: Arm, kind: Kind, steps: Sequence[TimedStep], schedule: Schedule) -> StepsCompared:
    own, control, with_plan = ([step for step in steps if step.arm == each] for each in (ENGINE, CONTROL, arm))
    phase, sequences = kind
    return StepsCompared(
        phase=phase,
        sequences=sequences,
        steps=len(steps),
        engine_us=fmean(_by_group(own or steps, schedule).values()),
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
    return Difference(us=fmean(pairs), half_interval_us=half_interval(pairs), pairs=len(pairs))


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

"""What a clock found of a Program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from kcap.replay.program.attribute import owners
from kcap.replay.timing.kernels import Ran
from kcap.replay.timing.stop import Sampled
from kcap.schemas.measurement import KernelDuration, Method


@dataclass(frozen=True)
class Shared:
    """The durations of one run, by Call: `us` of an invocation, and its kernels. `unmatched_us`: of no Call."""

    us: dict[int, float] = field(default_factory=dict)
    kernels: dict[int, list[KernelDuration]] = field(default_factory=dict)
    total_us: float | None = None
    unmatched_us: float | None = None


@dataclass(frozen=True)
class Found:
    """`sampled`: microseconds of one run, in each of which the clock saw `n`; `stretches`: the CUDA graphs it took."""

    sampled: Sampled
    n: int
    method: Method
    shared: Shared
    stretches: int = 0
    notes: list[str] = field(default_factory=list)
    spoiled: bool = False


def share_out(runs: Sequence[Sequence[Ran]], order: Sequence[int], kernels: dict[int, dict[str, int]]) -> Shared:
    """Give each profiled run's kernels to the Calls in `order`; means over the runs."""
    if not any(runs):
        return Shared()
    each: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    lost = 0.0
    for run in runs:
        for ran, place in zip(run, owners([one.name for one in run], order, kernels), strict=True):
            if place is None:
                lost += ran.us
            else:
                each[order[place]][ran.name].append(ran.us)
    counts = {call: order.count(call) * len(runs) for call in each}
    return Shared(
        {call: sum(map(sum, names.values())) / counts[call] for call, names in each.items()},
        {call: durations(names, counts[call]) for call, names in each.items()},
        fmean(sum(ran.us for ran in run) for run in runs),
        lost / len(runs),
    )


def durations(names: dict[str, list[float]], invocations: int) -> list[KernelDuration]:
    """The kernels of one of `invocations`, with the median of each name."""
    return [KernelDuration(name=name, us=median(us), count=len(us) / invocations) for name, us in names.items()]

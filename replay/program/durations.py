"""Attribute each kernel in the profile of a Program to an invocation, by their order, and so to a Call.

Run alone, every Call showed which kernels one invocation launches. Where the profile is exactly these in order, each
kernel's owner is certain. Where something differs (a library chose another kernel beside other neighbours), the longest
common sequences of names go to their owners and the rest to none, which the measurement states.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from math import isnan, nan
from statistics import fmean, median

from kcap.replay.timing.graphs import KernelRun
from kcap.schemas.results.measurement import KernelDuration


@dataclass(frozen=True)
class CallDurations:
    """The durations in one run, by Call: `us` of an invocation, and its kernels. `unmatched_us`: of no Call.

    `runs`: of each run, the microseconds of each invocation in order; nan where no kernel is known to be its own.
    """

    us: dict[int, float] = field(default_factory=dict)
    kernels: dict[int, list[KernelDuration]] = field(default_factory=dict)
    total_us: float | None = None
    unmatched_us: float | None = None
    runs: list[list[float]] = field(default_factory=list)


def attribute_kernels(
    runs: Sequence[Sequence[KernelRun]], order: Sequence[int], kernels: dict[int, dict[str, int]]
) -> CallDurations:
    """Attribute the kernels of each profiled run to the Calls in `order`; means over the runs."""
    if not any(runs):
        return CallDurations()
    by_call: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    unmatched, durations = 0.0, [[nan] * len(order) for _ in runs]
    for run, us in zip(runs, durations, strict=True):
        for kernel, position in zip(run, kernel_owners([kernel.name for kernel in run], order, kernels), strict=True):
            if position is None:
                unmatched += kernel.us
            else:
                by_call[order[position]][kernel.name].append(kernel.us)
                us[position] = kernel.us + (0.0 if isnan(us[position]) else us[position])
    counts = {call: order.count(call) * len(runs) for call in by_call}
    return CallDurations(
        {call: sum(map(sum, names.values())) / counts[call] for call, names in by_call.items()},
        {call: median_durations(names, counts[call]) for call, names in by_call.items()},
        fmean(sum(kernel.us for kernel in run) for run in runs),
        unmatched / len(runs),
        durations,
    )


def median_durations(names: dict[str, list[float]], invocations: int) -> list[KernelDuration]:
    """The kernels of one of `invocations`, with the median of each name."""
    return [KernelDuration(name=name, us=median(us), count=len(us) / invocations) for name, us in names.items()]


def kernel_owners(
    names: Sequence[str], order: Sequence[int], kernels: Mapping[int, Mapping[str, int]]
) -> list[int | None]:
    """For each kernel in `names` the position in `order` (Calls) of its invocation.

    `kernels`: by Call, the launches of one invocation by name.
    """
    return _owners_in_turn(names, order, kernels) or _owners_aligned(names, order, kernels)


def _owners_in_turn(
    names: Sequence[str], order: Sequence[int], kernels: Mapping[int, Mapping[str, int]]
) -> list[int | None] | None:
    """Every kernel's owner, if the names are exactly those of the invocations in order."""
    owners: list[int | None] = []
    for position, call in enumerate(order):
        size = sum(kernels[call].values())
        if Counter(names[len(owners) : len(owners) + size]) != Counter(kernels[call]):
            return None
        owners += [position] * size
    return owners if len(owners) == len(names) else None


def _owners_aligned(
    names: Sequence[str], order: Sequence[int], kernels: Mapping[int, Mapping[str, int]]
) -> list[int | None]:
    expected = [(name, position) for position, call in enumerate(order) for name in Counter(kernels[call]).elements()]
    owners: list[int | None] = [None] * len(names)
    matcher = SequenceMatcher(None, [name for name, _ in expected], list(names), autojunk=False)
    for first, start, size in matcher.get_matching_blocks():
        for step in range(size):
            owners[start + step] = expected[first + step][1]
    return _owners_between(owners)


def _owners_between(owners: list[int | None]) -> list[int | None]:
    """The owners, where a kernel without one between two of the same invocation belongs to it, too."""
    filled = list(owners)
    last: tuple[int, int] | None = None  # position in the profile, and owner
    for position, owner in enumerate(owners):
        if owner is None:
            continue
        if last is not None and last[1] == owner:
            filled[last[0] + 1 : position] = [owner] * (position - last[0] - 1)
        last = position, owner
    return filled

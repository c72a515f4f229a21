"""Which invocation of a Program each kernel of its profile belongs to, by their order, and so each Call's durations.

Alone, every Call told which kernels an invocation of it runs. Where the profile is just these one after another, each
kernel's owner is certain; where something differs (a library chose another kernel among other neighbours), the longest
common sequences of names are given to their owners, and the rest to none, which the measurement tells.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from statistics import fmean, median

from kcap.replay.timing.graphs import KernelRun
from kcap.schemas.results.measurement import KernelDuration


@dataclass(frozen=True)
class CallDurations:
    """The durations of one run, by Call: `us` of an invocation, and its kernels. `unmatched_us`: of no Call."""

    us: dict[int, float] = field(default_factory=dict)
    kernels: dict[int, list[KernelDuration]] = field(default_factory=dict)
    total_us: float | None = None
    unmatched_us: float | None = None


def share_out(
    runs: Sequence[Sequence[KernelRun]], order: Sequence[int], kernels: dict[int, dict[str, int]]
) -> CallDurations:
    """Give each profiled run's kernels to the Calls in `order`; means over the runs."""
    if not any(runs):
        return CallDurations()
    each: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    lost = 0.0
    for run in runs:
        for ran, place in zip(run, kernel_owners([one.name for one in run], order, kernels), strict=True):
            if place is None:
                lost += ran.us
            else:
                each[order[place]][ran.name].append(ran.us)
    counts = {call: order.count(call) * len(runs) for call in each}
    return CallDurations(
        {call: sum(map(sum, names.values())) / counts[call] for call, names in each.items()},
        {call: median_durations(names, counts[call]) for call, names in each.items()},
        fmean(sum(ran.us for ran in run) for run in runs),
        lost / len(runs),
    )


def median_durations(names: dict[str, list[float]], invocations: int) -> list[KernelDuration]:
    """The kernels of one of `invocations`, with the median of each name."""
    return [KernelDuration(name=name, us=median(us), count=len(us) / invocations) for name, us in names.items()]


def kernel_owners(
    names: Sequence[str], order: Sequence[int], kernels: Mapping[int, Mapping[str, int]]
) -> list[int | None]:
    """By kernel in `names`: the place in `order` (Calls) of its invocation; `kernels`: of one invocation of each."""
    return _owners_in_turn(names, order, kernels) or _owners_aligned(names, order, kernels)


def _owners_in_turn(
    names: Sequence[str], order: Sequence[int], kernels: Mapping[int, Mapping[str, int]]
) -> list[int | None] | None:
    """Every kernel's owner, if the names are those of the invocations one after another."""
    found: list[int | None] = []
    for place, call in enumerate(order):
        size = sum(kernels[call].values())
        if Counter(names[len(found) : len(found) + size]) != Counter(kernels[call]):
            return None
        found += [place] * size
    return found if len(found) == len(names) else None


def _owners_aligned(
    names: Sequence[str], order: Sequence[int], kernels: Mapping[int, Mapping[str, int]]
) -> list[int | None]:
    expected = [(name, place) for place, call in enumerate(order) for name in Counter(kernels[call]).elements()]
    found: list[int | None] = [None] * len(names)
    matcher = SequenceMatcher(None, [name for name, _ in expected], list(names), autojunk=False)
    for first, start, size in matcher.get_matching_blocks():
        for step in range(size):
            found[start + step] = expected[first + step][1]
    return _owners_between(found)


def _owners_between(found: list[int | None]) -> list[int | None]:
    """A kernel without owner between two of one invocation is of that invocation, too."""
    out = list(found)
    last: tuple[int, int] | None = None  # place in the profile, and owner
    for here, owner in enumerate(found):
        if owner is None:
            continue
        if last is not None and last[1] == owner:
            out[last[0] + 1 : here] = [owner] * (here - last[0] - 1)
        last = here, owner
    return out

"""Which invocation of a Program each kernel of its profile belongs to, by their order.

Alone, every Call told which kernels an invocation of it runs. Where the profile is just these one after another, each
kernel's owner is certain; where something differs (a library chose another kernel among other neighbours), the longest
common sequences of names are given to their owners, and the rest to none, which the measurement tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher


def owners(names: Sequence[str], order: Sequence[int], kernels: Mapping[int, Mapping[str, int]]) -> list[int | None]:
    """By kernel in `names`: the place in `order` (Calls) of its invocation; `kernels`: of one invocation of each."""
    return _in_turn(names, order, kernels) or _aligned(names, order, kernels)


def _in_turn(
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


def _aligned(names: Sequence[str], order: Sequence[int], kernels: Mapping[int, Mapping[str, int]]) -> list[int | None]:
    expected = [(name, place) for place, call in enumerate(order) for name in Counter(kernels[call]).elements()]
    found: list[int | None] = [None] * len(names)
    matcher = SequenceMatcher(None, [name for name, _ in expected], list(names), autojunk=False)
    for first, start, size in matcher.get_matching_blocks():
        for step in range(size):
            found[start + step] = expected[first + step][1]
    return _between(found)


def _between(found: list[int | None]) -> list[int | None]:
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

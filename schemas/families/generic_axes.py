"""Axes inferred over all Calls of a pattern: constant, variable, shared; and what ties the variable ones together.

A dimension that never differs is constant and named by its size (`d4096`); others are `n0`, `n1`, … in the order of
the inputs, those that always agree under one name. With one Call, or Calls of the same sizes, all are constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

Column = tuple[int, ...]
MOST_TIED = 12  # variable axes among which sums and products are looked for
LARGEST_STEP = 8  # a constant difference (`n1 == n0 + 1`) beyond it is taken for chance


@dataclass(frozen=True)
class Axes:
    """`names`: the axis of each input dimension. `variable`: the variable axes with their size in each row."""

    names: tuple[str, ...]
    variable: dict[str, Column]

    def sizes(self, row: Sequence[int]) -> dict[str, int]:
        return dict(zip(self.names, row, strict=True))


def infer(rows: Sequence[Sequence[int]]) -> Axes:
    """The axes of dimensions with these sizes, a row for each Call."""
    known: dict[Column, str] = {}
    names = []
    for column in zip(*rows, strict=True):
        if len(set(column)) == 1:
            names.append(constant(column[0]))
        else:
            names.append(known.setdefault(column, f"n{len(known)}"))
    return Axes(tuple(names), {name: column for column, name in known.items()})


def constant(size: int) -> str:
    return f"d{size}"


def telling(axes: Axes, rows: Sequence[Sequence[int]]) -> list[int]:
    """The rows that stand for all: of each way in which axes agree, are 0 or are 1, those with the extremes.

    What an operator does with sizes depends on whether they are equal, 0 or 1 (broadcasting); apart from that the sizes
    of its outputs grow with those of its inputs.
    """
    columns = list(axes.variable.values())
    kinds: dict[tuple[int, ...], list[int]] = {}
    for index in range(len(rows)):
        kinds.setdefault(_kind([column[index] for column in columns]), []).append(index)
    chosen = set()
    for members in kinds.values():
        chosen.add(members[0])
        for column in columns:
            chosen |= {min(members, key=column.__getitem__), max(members, key=column.__getitem__)}
    return sorted(chosen)


def _kind(sizes: list[int]) -> tuple[int, ...]:
    return tuple(-1 - size if size < 2 else sizes.index(size) for size in sizes)


def constraints(axes: Axes) -> tuple[str, ...]:
    """Which variable axes are sums, differences or products of others: `n2 == n0 + n1`, `n1 == 2 * n0`."""
    found: list[str] = []
    tied: dict[str, Column] = {}
    for name, column in list(axes.variable.items())[:MOST_TIED]:
        told = _step(name, column, tied) or _pair(name, column, tied)
        if told is None:
            tied[name] = column
        else:
            found.append(told)
    return tuple(found)


def _step(name: str, column: Column, others: dict[str, Column]) -> str | None:
    """`column` as a multiple of another or the other way round, or as a constant more or less."""
    for other, sizes in others.items():
        for big, large, small, little in ((name, column, other, sizes), (other, sizes, name, column)):
            factor = large[0] // little[0] if little[0] else 0
            if factor > 1 and _same(large, (factor * n for n in little)):
                return f"{big} == {factor} * {small}"
        step = column[0] - sizes[0]
        if abs(step) <= LARGEST_STEP and _same(column, (n + step for n in sizes)):
            return f"{name} == {other} {'+' if step > 0 else '-'} {abs(step)}"
    return None


def _pair(name: str, column: Column, others: dict[str, Column]) -> str | None:
    """`column` as a sum, difference or product of two others; two distinct Calls would prove none."""
    if len(set(zip(column, *others.values(), strict=True))) < 3:
        return None
    for (a, first), (b, second) in combinations_with_replacement(others.items(), 2):
        pairs = list(zip(first, second, strict=True))
        for sign, sizes in (
            ("+", (m + n for m, n in pairs)),
            ("*", (m * n for m, n in pairs)),
            ("-", (m - n for m, n in pairs)),
        ):
            if _same(column, sizes):
                return f"{name} == {a} {sign} {b}"
        if _same(column, (n - m for m, n in pairs)):
            return f"{name} == {b} - {a}"
    return None


def _same(column: Column, sizes: Iterable[int]) -> bool:
    return all(have == want for have, want in zip(column, sizes, strict=True))

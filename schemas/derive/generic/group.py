"""Calls that make one Definition, and the axes inferred over all of them: constant, variable, shared.

A dimension that never differs is constant and named by its size (`d4096`); others are `n0`, `n1`, … in the order of
the inputs, those that always agree under one name. With one Call, or Calls of the same sizes, all are constant.

An axis that only an output has could not be bound to anything: Calls that would need one are split, first by which
dimensions are 1 (broadcasting), else by the size itself (the size that `cat` sums up is then constant).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement

from kcap.schemas.derive.generic.outputs import Output, Signature
from kcap.schemas.derive.generic.pattern import Member, Number
from kcap.schemas.derive.invocation import Unrecognized

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


def infer_axes(rows: Sequence[Sequence[int]]) -> Axes:
    """The axes of dimensions with these sizes, a row for each Call."""
    name_by_column: dict[Column, str] = {}
    names = []
    for column in zip(*rows, strict=True):
        if len(set(column)) == 1:
            names.append(constant_axis(column[0]))
        else:
            names.append(name_by_column.setdefault(column, f"n{len(name_by_column)}"))
    return Axes(tuple(names), {name: column for column, name in name_by_column.items()})


def constant_axis(size: int) -> str:
    return f"d{size}"


def representative_rows(axes: Axes, rows: Sequence[Sequence[int]]) -> list[int]:
    """The rows that represent all: for each way in which an axis is 0 or is 1, those with its extreme sizes.

    What an operator does with a size depends on whether it is 0 or 1 (broadcasting); apart from that the sizes of its
    outputs grow with it. Of several axes they may grow with a sum or a product, so that each row tells something.
    """
    distinct: dict[tuple[int, ...], int] = {}
    for index, sizes in enumerate(zip(*axes.variable.values(), strict=True)):
        distinct.setdefault(sizes, index)
    if len(axes.variable) > 1:
        return sorted(distinct.values())
    kinds: dict[int, list[int]] = {}
    for (size,) in distinct:
        kinds.setdefault(min(size, 2), []).append(size)
    extremes = {(size,) for sizes in kinds.values() for size in (min(sizes), max(sizes))}
    return sorted({0, *(distinct[sizes] for sizes in extremes)})


def axis_constraints(axes: Axes) -> tuple[str, ...]:
    """Which variable axes are sums, differences or products of others: `n2 == n0 + n1`, `n1 == 2 * n0`."""
    constraints: list[str] = []
    tied: dict[str, Column] = {}
    for name, column in list(axes.variable.items())[:MOST_TIED]:
        constraint = _step(name, column, tied) or _pair(name, column, tied)
        if constraint is None:
            tied[name] = column
        else:
            constraints.append(constraint)
    return tuple(constraints)


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


Shape = tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """`outputs` of the first member, with their axes; `typical`: members that represent all."""

    signature: Signature
    members: list[Member]
    axes: Axes
    outputs: list[tuple[Output, Shape]]
    scalars: list[Number]
    typical: list[Member]


@dataclass
class Grouping:
    """The groups of one pattern's members; `refused` says why a member is in none, by its Call's id."""

    signature: Signature
    refused: dict[int, str] = field(default_factory=dict)
    outputs_by_key: dict[Hashable, tuple[Output, ...]] = field(default_factory=dict)
    meta_suffices: bool = False

    def groups(self, members: list[Member]) -> Iterator[Group]:
        rows = [self.signature.row(member) for member in members]
        axes = infer_axes(rows)
        typical = [members[index] for index in self._representatives(axes, rows, members)]
        try:
            outputs_by_member = [self._outputs(member) for member in typical]
            shapes = _shapes([axes.sizes(self.signature.row(member)) for member in typical], axes, outputs_by_member)
            parts = self._split(axes, members) if shapes is None else []
        except Unrecognized:
            yield from self._without(members)
            return
        for part in parts:
            yield from self.groups(part)
        if shapes is not None:
            outputs = list(zip(outputs_by_member[0], shapes, strict=True))
            yield Group(self.signature, members, axes, outputs, self._scalars(members), typical)

    def _representatives(self, axes: Axes, rows: list[tuple[int, ...]], members: list[Member]) -> list[int]:
        """The members that represent all sizes and, of each number that differs, those with its extremes."""
        chosen = set(representative_rows(axes, rows))
        for index in range(len(members[0].numbers)):
            values = {m.numbers[index]: i for i, m in enumerate(members) if isinstance(m.numbers[index], int | float)}
            if len(values) > 1:
                chosen |= {values[min(values)], values[max(values)]}
        return sorted(chosen)

    def _outputs(self, member: Member) -> tuple[Output, ...]:
        """The member's outputs; without a device once that gave the same for another member."""
        key = (member.sizes, tuple(map(repr, member.numbers)))
        if key not in self.outputs_by_key:
            outputs = self.signature.outputs(member, "meta" if self.meta_suffices else "")
            self.meta_suffices = self.meta_suffices or self._same_on_meta(member, outputs)
            self.outputs_by_key[key] = outputs
        return self.outputs_by_key[key]

    def _same_on_meta(self, member: Member, outputs: tuple[Output, ...]) -> bool:
        try:
            return self.signature.outputs(member, "meta") == outputs
        except Unrecognized:
            return False

    def _without(self, members: list[Member]) -> Iterator[Group]:
        """The groups of the members that torch accepts, tried one by one; the others are refused."""
        taken = []
        for member in members:
            try:
                self._outputs(member)
            except Unrecognized as error:
                self.refused[member.call.id] = str(error)
            else:
                taken.append(member)
        if taken:
            yield from self.groups(taken)

    def _split(self, axes: Axes, members: list[Member]) -> list[list[Member]]:
        parts: dict[Hashable, list[Member]] = defaultdict(list)
        for member in members:
            parts[self._ones(axes, member)].append(member)
        if len(parts) > 1:
            return list(parts.values())
        parts.clear()
        for member in members:
            parts[tuple((o.dtype, o.shape) for o in self._outputs(member))].append(member)
        return list(parts.values())

    def _ones(self, axes: Axes, member: Member) -> tuple[bool, ...]:
        sizes = axes.sizes(self.signature.row(member))
        return tuple(sizes[name] == 1 for name in axes.variable)

    def _scalars(self, members: list[Member]) -> list[Number]:
        """The numbers that are inputs: those that differ, or that drift."""
        columns = zip(*(member.numbers for member in members), strict=True)
        numbers = self.signature.pattern.numbers()
        return [
            n
            for n, values in zip(numbers, columns, strict=True)
            if len(set(map(repr, values))) > 1 or n.type == "number"
        ]


def _shapes(sizes: list[dict[str, int]], axes: Axes, outputs_by_member: list[tuple[Output, ...]]) -> list[Shape] | None:
    """The axes of each output; None if one has a size of its own.

    `sizes`, `outputs_by_member`: of the members that represent all.
    """
    if len({tuple((output.dtype, len(output.shape)) for output in outputs) for outputs in outputs_by_member}) > 1:
        return None
    shapes = []
    for index in range(len(outputs_by_member[0])):
        columns = zip(*(outputs[index].shape for outputs in outputs_by_member), strict=True)
        names = [_axis(sizes, axes, column) for column in columns]
        if None in names:
            return None
        shapes.append(tuple(name for name in names if name is not None))
    return shapes


def _axis(sizes: list[dict[str, int]], axes: Axes, column: tuple[int, ...]) -> str | None:
    """The input's axis that has these sizes, or a constant one."""
    if len(set(column)) == 1:
        return constant_axis(column[0])
    return next((n for n in axes.variable if all(s[n] == c for s, c in zip(sizes, column, strict=True))), None)

"""Calls that make one Definition: of one pattern, whose outputs have the inputs' axes or a constant size.

An axis that only an output has could not be bound to anything: Calls that would need one are split, first by which
dimensions are 1 (broadcasting), else by the size itself (the sum that `cat` makes is then constant).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from kcap.schemas.families.generic_axes import Axes, constant, infer, telling
from kcap.schemas.families.generic_outputs import Output, Signature
from kcap.schemas.families.generic_pattern import Member, Number
from kcap.schemas.families.invocation import Unrecognized

Shape = tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """`outputs` of the first member, with their axes; `typical`: members that stand for all."""

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
    known: dict[Hashable, tuple[Output, ...]] = field(default_factory=dict)
    plain: bool = False

    def groups(self, members: list[Member]) -> Iterator[Group]:
        rows = [self.signature.row(member) for member in members]
        axes = infer(rows)
        typical = [members[index] for index in self._telling(axes, rows, members)]
        try:
            found = [self._outputs(member) for member in typical]
            shapes = _shapes([axes.sizes(self.signature.row(member)) for member in typical], axes, found)
            parts = self._split(axes, members) if shapes is None else []
        except Unrecognized:
            yield from self._without(members)
            return
        for part in parts:
            yield from self.groups(part)
        if shapes is not None:
            outputs = list(zip(found[0], shapes, strict=True))
            yield Group(self.signature, members, axes, outputs, self._scalars(members), typical)

    def _telling(self, axes: Axes, rows: list[tuple[int, ...]], members: list[Member]) -> list[int]:
        """The sizes that stand for all and, of each number that differs, the members with its extremes."""
        chosen = set(telling(axes, rows))
        for place in range(len(members[0].numbers)):
            values = {m.numbers[place]: i for i, m in enumerate(members) if isinstance(m.numbers[place], int | float)}
            if len(values) > 1:
                chosen |= {values[min(values)], values[max(values)]}
        return sorted(chosen)

    def _outputs(self, member: Member) -> tuple[Output, ...]:
        """The member's outputs; on no device where that told the same of another member."""
        key = (member.sizes, tuple(map(repr, member.numbers)))
        if key not in self.known:
            found = self.signature.outputs(member, "meta" if self.plain else "")
            self.plain = self.plain or self._told_plainly(member, found)
            self.known[key] = found
        return self.known[key]

    def _told_plainly(self, member: Member, found: tuple[Output, ...]) -> bool:
        try:
            return self.signature.outputs(member, "meta") == found
        except Unrecognized:
            return False

    def _without(self, members: list[Member]) -> Iterator[Group]:
        """The groups of those that torch takes, asked for one by one; the others are refused."""
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
        return [n for n, values in zip(numbers, columns, strict=True) if len(set(map(repr, values))) > 1 or _drifts(n)]


def _drifts(number: Number) -> bool:
    return number.type == "number"


def _shapes(sizes: list[dict[str, int]], axes: Axes, found: list[tuple[Output, ...]]) -> list[Shape] | None:
    """The axes of each output; None if one has a size of its own. `sizes`, `found`: of the Calls that stand for all."""
    if len({tuple((output.dtype, len(output.shape)) for output in outputs) for outputs in found}) > 1:
        return None
    shapes = []
    for place in range(len(found[0])):
        columns = zip(*(outputs[place].shape for outputs in found), strict=True)
        names = [_axis(sizes, axes, column) for column in columns]
        if None in names:
            return None
        shapes.append(tuple(name for name in names if name is not None))
    return shapes


def _axis(sizes: list[dict[str, int]], axes: Axes, column: tuple[int, ...]) -> str | None:
    """The input's axis that has these sizes, or a constant one."""
    if len(set(column)) == 1:
        return constant(column[0])
    return next((n for n in axes.variable if all(s[n] == c for s, c in zip(sizes, column, strict=True))), None)

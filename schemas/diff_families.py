"""How two engines run a model: their kernels side by side, by what they are for, in the mean step of each phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kcap.schemas.records import Call
from kcap.schemas.signature import signature

DIGITS = 6  # of a count in a step
Key: TypeAlias = tuple[str, str]  # purpose (of no family: empty) and name


@dataclass
class Ran:
    """In one step and on one rank: invocations by operator and by arguments, and microseconds where they are known."""

    operators: dict[str, float] = field(default_factory=dict)
    arguments: dict[str, float] = field(default_factory=dict)
    us: float | None = None

    def add(self, call: Call, count: float) -> None:
        named = {call.operator: self.operators, signature(call.args): self.arguments}
        for name, counts in named.items():
            counts[name] = counts.get(name, 0.0) + count

    @property
    def count(self) -> float:
        return sum(self.operators.values())

    def as_json(self) -> dict[str, Any]:
        named = {"operators": rounded(self.operators), "arguments": rounded(self.arguments)}
        return {"per_step": round(self.count, DIGITS), "us_per_step": self.us, **named}


def rounded(counts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(count, DIGITS) for name, count in counts.items()}


@dataclass(frozen=True)
class Line:
    """A Definition of a family, or an operator of none, as both run it."""

    purpose: str
    name: str
    a: Ran | None
    b: Ran | None

    @property
    def same(self) -> bool:
        return self.a is not None and self.b is not None and abs(self.a.count - self.b.count) < 1e-9

    def as_json(self) -> dict[str, Any]:
        sides = {"a": self.a.as_json() if self.a else None, "b": self.b.as_json() if self.b else None}
        return {"purpose": self.purpose or None, "name": self.name, **sides}


@dataclass(frozen=True)
class Side:
    """One Recording in one phase. `batches`: steps by (sequences, tokens); `lines`: what a step runs.

    `within`: microseconds in a step of regions that several lines share, by purpose; `untimed`: invocations in a step
    that have no time; None where nothing was measured.
    """

    steps: int
    batches: Mapping[tuple[int, int], int]
    lines: Mapping[Key, Ran]
    within: Mapping[str, float]
    untimed: float | None

    @property
    def count(self) -> float:
        return sum(ran.count for ran in self.lines.values())

    @property
    def us(self) -> float | None:
        if self.untimed is None:
            return None
        return sum(ran.us or 0.0 for ran in self.lines.values()) + sum(self.within.values())

    def as_json(self) -> dict[str, Any]:
        batches = [{"sequences": s, "tokens": t, "steps": n} for (s, t), n in sorted(self.batches.items())]
        untimed = None if self.untimed is None else round(self.untimed, DIGITS)
        totals = {"per_step": round(self.count, DIGITS), "us_per_step": self.us, "untimed_per_step": untimed}
        return {"steps": self.steps, "batches": batches, **totals, "us_within": dict(self.within)}


@dataclass(frozen=True)
class PhaseDiff:
    """A phase that both have. Counts of a step compare; shapes and times do only where the batches are the same."""

    phase: str
    a: Side
    b: Side

    @property
    def lines(self) -> list[Line]:
        """The most called first, within a purpose, too."""
        keys = dict.fromkeys([*self.a.lines, *self.b.lines])
        found = [Line(*key, self.a.lines.get(key), self.b.lines.get(key)) for key in keys]
        return sorted(found, key=lambda one: (-_most(one), one.name))

    @property
    def same_batches(self) -> bool:
        return _shares(self.a) == _shares(self.b)

    def as_json(self) -> dict[str, Any]:
        head = {"phase": self.phase, "same_batches": self.same_batches}
        sides = {"a": self.a.as_json(), "b": self.b.as_json()}
        return {**head, **sides, "lines": [line.as_json() for line in self.lines]}


def _most(line: Line) -> float:
    return max(ran.count for ran in (line.a, line.b) if ran)


def _shares(side: Side) -> dict[tuple[int, int], float]:
    return {batch: steps / side.steps for batch, steps in side.batches.items()}


@dataclass(frozen=True)
class FamilyDiff:
    """`phases`: those that both ran, decode first; `alone`: steps of a phase that one has not: in A and in B."""

    phases: list[PhaseDiff]
    alone: dict[str, tuple[int, int]]
    warnings: list[str]

    @property
    def equal(self) -> bool:
        return not self.alone and all(line.same for phase in self.phases for line in phase.lines)

    def as_json(self) -> dict[str, Any]:
        alone = {phase: {"a": a, "b": b} for phase, (a, b) in self.alone.items()}
        told = {"equal": self.equal, "warnings": self.warnings, "phases_of_one": alone}
        return {**told, "phases": [phase.as_json() for phase in self.phases]}


def purposes(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Lines of one purpose together, the most called first; then those of no family, each under its own name."""
    found: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        found[line.purpose or line.name].append(line)
    order = sorted(found, key=lambda name: (not found[name][0].purpose, -_sum(found[name])))
    return {name: found[name] for name in order}


def _sum(lines: list[Line]) -> float:
    return max(sum(line.a.count for line in lines if line.a), sum(line.b.count for line in lines if line.b))

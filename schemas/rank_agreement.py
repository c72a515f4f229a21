"""Whether ranks that must run the same did: those of one tensor parallel group, in one replica of data parallelism.

They are given the same batches, so each of their steps runs the same Calls in the same order. Compared are operators
and the shapes and dtypes of tensors; scalars (which part of the vocabulary is whose) and the rank in a group are each
rank's own. Ranks whose windows held other numbers of steps (one died, or closed a step earlier) are compared in the
steps that both list. Stages of a pipeline and replicas run other things, and are not compared.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from kcap.schemas.ranks import Difference, Disagreement, Rank
from kcap.schemas.records import Call, Program, Step
from kcap.schemas.signature import short

TENSOR, DATA = "tp", "dp"
MOST = 20  # Calls that a Disagreement lists
SOURCE = re.compile(r"\.s[0-9a-f]{8}$")  # a compiled kernel has its rank's own constants in its source

Kernel: TypeAlias = tuple[str, str]  # the operator, and its tensors
Ran: TypeAlias = tuple[Kernel, ...]  # what a step ran, in order


def disagreements(
    ranks: Sequence[Rank], calls: Sequence[Call], programs: Sequence[Program], steps: Sequence[Step]
) -> list[Disagreement]:
    """Where ranks that must agree ran different steps, by phase; nothing where none must."""
    ran = _Ran(calls, programs, steps)
    return [found for first, other in _pairs(ranks) for found in _compared(ran, first.rank, other.rank)]


def _pairs(ranks: Sequence[Rank]) -> Iterator[tuple[Rank, Rank]]:
    """The first rank that is here of each group with each of the others."""
    groups: dict[tuple[tuple[int, ...], int], list[Rank]] = defaultdict(list)
    for rank in ranks:
        if group := rank.groups.get(TENSOR):
            groups[tuple(group), rank.places.get(DATA, 0)].append(rank)
    for first, *others in groups.values():
        yield from ((first, other) for other in others)


@dataclass(frozen=True)
class _Ran:
    calls: Sequence[Call]
    programs: Sequence[Program]
    listed: Sequence[Step]

    @cached_property
    def _kernels(self) -> dict[int, Kernel]:
        return {call.id: _kernel(call) for call in self.calls if call.kind == "kernel" and call.work}

    @cached_property
    def _programs(self) -> dict[int, Ran]:
        plain = {program.id: program.calls for program in self.programs}
        return {program.id: self._flat(program, plain) for program in self.programs if program.kind == "step"}

    def _flat(self, program: Program, plain: dict[int, list[int]]) -> Ran:
        inner: dict[int, list[int]] = defaultdict(list)
        for position, graph in program.graphs:
            inner[position] += plain.get(graph, [])
        order = [call for n in range(len(program.calls) + 1) for call in (*inner[n], *program.calls[n : n + 1])]
        return tuple(self._kernels[call] for call in order if call in self._kernels)

    def whole(self, rank: int) -> dict[str, Counter[Ran]]:
        """How often the rank ran what, in all its steps of each phase."""
        found: dict[str, Counter[Ran]] = defaultdict(Counter)
        for program in self.programs:
            if program.kind == "step":
                for one in program.counts:
                    if one.rank == rank:
                        found[one.phase][self._programs[program.id]] += one.count
        return found

    def both(self, one: int, other: int) -> tuple[dict[str, Counter[Ran]], dict[str, Counter[Ran]]]:
        """The same of the steps that both list, known by their batches."""
        first, second = self._by_batch(one), self._by_batch(other)
        same = [batch for batch, found in first.items() if len(found) == len(second.get(batch, ()))]
        return _joined(first, same), _joined(second, same)

    def _by_batch(self, rank: int) -> dict[tuple[str, str], list[Ran]]:
        found: dict[tuple[str, str], list[Ran]] = defaultdict(list)
        for step in self.listed:
            if step.rank == rank and step.program in self._programs:
                batch = f"{step.tokens} {step.queries} {step.lengths}"
                found[step.phase, batch].append(self._programs[step.program])
        return found


def _joined(steps: dict[tuple[str, str], list[Ran]], batches: list[tuple[str, str]]) -> dict[str, Counter[Ran]]:
    found: dict[str, Counter[Ran]] = defaultdict(Counter)
    for phase, batch in batches:
        found[phase].update(steps[phase, batch])
    return found


def _kernel(call: Call) -> Kernel:
    tensors = [short(spec) for _, spec in call.tensors()]
    return (SOURCE.sub("", call.operator) if call.launch else call.operator), " x ".join(tensors)


def _compared(ran: _Ran, one: int, other: int) -> Iterator[Disagreement]:
    whole, listed = (ran.whole(one), ran.whole(other)), ran.both(one, other)
    for phase in sorted({*whole[0], *whole[1]}):
        mine, theirs = (found[phase] for found in whole)
        if mine.total() != theirs.total():
            mine, theirs = (found[phase] for found in listed)
        if mine != theirs:
            yield _disagreement((one, other), phase, mine - theirs, theirs - mine)


def _disagreement(ranks: tuple[int, int], phase: str, mine: Counter[Ran], theirs: Counter[Ran]) -> Disagreement:
    counts = _kernels(mine), _kernels(theirs)
    differing = [kernel for kernel in {**counts[0], **counts[1]} if counts[0][kernel] != counts[1][kernel]]
    named = [
        Difference(operator=kernel[0], signature=kernel[1], counts=[count[kernel] for count in counts])
        for kernel in differing
    ]
    return Disagreement(
        ranks=list(ranks),
        phase=phase,
        steps=[mine.total(), theirs.total()],
        calls=named[:MOST],
        more=len(named[MOST:]),
    )


def _kernels(steps: Counter[Ran]) -> Counter[Kernel]:
    total: Counter[Kernel] = Counter()
    for step, times in steps.items():
        for kernel in step:
            total[kernel] += times
    return total

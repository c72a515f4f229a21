"""Whether ranks that must run the same did: those of one tensor parallel group, in one replica of data parallelism.

They get the same batches, so each of their steps runs the same Calls in the same order. Compared are operators
and the shapes and dtypes of tensors; scalars (which part of the vocabulary is whose) and the rank in a group are each
rank's own. Ranks whose windows held other numbers of steps (one died, or closed a step earlier) are compared in the
steps that both list. Stages of a pipeline and replicas run other things, and are not compared.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TypeAlias

from kcap.schemas.recording.records import REPLICA, Call, Difference, Disagreement, Program, Rank, Step
from kcap.schemas.recording.signature import short

TENSOR = "tp"
MOST = 20  # Calls that a Disagreement lists
SOURCE = re.compile(r"\.s[0-9a-f]{8}$")  # a compiled kernel has its rank's own constants in its source

KernelKey: TypeAlias = tuple[str, str]  # the operator, and its tensors
KernelSequence: TypeAlias = tuple[KernelKey, ...]  # what a step ran, in order
StepCounts: TypeAlias = dict[str, Counter[int]]  # of each phase, how often what was run, by its number
Batch: TypeAlias = tuple[str, str]  # a step's phase, and what else is known of it before it runs


def disagreements(
    ranks: Sequence[Rank], calls: Sequence[Call], programs: Sequence[Program], steps: Sequence[Step]
) -> list[Disagreement]:
    """Where ranks that must agree ran different steps, by phase; nothing where none must."""
    ran = _StepsByRank(calls, programs, steps)
    return [
        disagreement for first, other in _rank_pairs(ranks) for disagreement in _compare(ran, first.rank, other.rank)
    ]


def _rank_pairs(ranks: Sequence[Rank]) -> Iterator[tuple[Rank, Rank]]:
    """The first rank that is here of each group with each of the others."""
    groups: dict[tuple[tuple[int, ...], int], list[Rank]] = defaultdict(list)
    for rank in ranks:
        if group := rank.groups.get(TENSOR):
            groups[tuple(group), rank.places.get(REPLICA, 0)].append(rank)
    for first, *others in groups.values():
        yield from ((first, other) for other in others)


class _StepsByRank:
    """What each rank's steps ran. Programs that ran the same kernels have the same number in `order`."""

    def __init__(self, calls: Sequence[Call], programs: Sequence[Program], steps: Sequence[Step]) -> None:
        self._kernels = {call.id: _kernel(call) for call in calls if call.kind == "kernel" and call.work}
        self._inner = {program.id: program.calls for program in programs}
        self.order: dict[KernelSequence, int] = {}
        self._number = {p.id: self._intern(p) for p in programs if p.kind == "step"}
        self._all_steps: dict[int, StepCounts] = defaultdict(lambda: defaultdict(Counter))
        for program in programs:
            for count in program.counts if program.id in self._number else ():
                self._all_steps[count.rank][count.phase][self._number[program.id]] += count.count
        self._steps = steps

    def _intern(self, program: Program) -> int:
        graphs: dict[int, list[int]] = defaultdict(list)
        for position, graph in program.graphs:
            graphs[position] += self._inner.get(graph, [])
        order = [call for n in range(len(program.calls) + 1) for call in (*graphs[n], *program.calls[n : n + 1])]
        ran = tuple(self._kernels[call] for call in order if call in self._kernels)
        return self.order.setdefault(ran, len(self.order))

    def all_steps(self, rank: int) -> StepCounts:
        """How often the rank ran what, in all its steps of each phase."""
        return self._all_steps[rank]

    def common_steps(self, one: int, other: int, phase: str) -> tuple[Counter[int], Counter[int]]:
        """How often each ran what, in the steps of one phase that both list; steps are matched by their batches."""
        first, second = self._listed[one], self._listed[other]
        same = [b for b, numbers in first.items() if b[0] == phase and len(numbers) == len(second.get(b, ()))]
        return Counter(n for b in same for n in first[b]), Counter(n for b in same for n in second[b])

    @cached_property
    def _listed(self) -> dict[int, dict[Batch, list[int]]]:
        numbers_by_batch: dict[int, dict[Batch, list[int]]] = defaultdict(lambda: defaultdict(list))
        for step in self._steps:
            if step.program in self._number:
                batch = f"{step.tokens} {step.queries} {step.lengths}"
                numbers_by_batch[step.rank][step.phase, batch].append(self._number[step.program])
        return numbers_by_batch


def _kernel(call: Call) -> KernelKey:
    tensors = [short(spec) for _, spec in call.tensors()]
    return (SOURCE.sub("", call.operator) if call.launch else call.operator), " x ".join(tensors)


def _compare(ran: _StepsByRank, one: int, other: int) -> Iterator[Disagreement]:
    first, second = ran.all_steps(one), ran.all_steps(other)
    kernels = list(ran.order)
    for phase in sorted({*first, *second}):
        mine, theirs = first[phase], second[phase]
        if mine.total() != theirs.total():
            mine, theirs = ran.common_steps(one, other, phase)
        if mine != theirs:
            kernel_counts = [
                Counter({kernels[n]: times for n, times in differing.items()})
                for differing in (mine - theirs, theirs - mine)
            ]
            yield _disagreement((one, other), phase, *kernel_counts)


def _disagreement(
    ranks: tuple[int, int], phase: str, mine: Counter[KernelSequence], theirs: Counter[KernelSequence]
) -> Disagreement:
    counts = _kernels(mine), _kernels(theirs)
    differing = [kernel for kernel in {**counts[0], **counts[1]} if counts[0][kernel] != counts[1][kernel]]
    differences = [
        Difference(operator=kernel[0], signature=kernel[1], counts=[count[kernel] for count in counts])
        for kernel in differing
    ]
    return Disagreement(
        ranks=list(ranks),
        phase=phase,
        steps=[mine.total(), theirs.total()],
        calls=differences[:MOST],
        more=len(differences[MOST:]),
    )


def _kernels(steps: Counter[KernelSequence]) -> Counter[KernelKey]:
    total: Counter[KernelKey] = Counter()
    for step, times in steps.items():
        for kernel in step:
            total[kernel] += times
    return total

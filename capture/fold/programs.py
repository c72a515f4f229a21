"""The Programs of all shards, folded: what the steps and their graphs ran, in order, and how often."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from kcap.capture.fold.calls import Fold
from kcap.capture.fold.requests import Requests
from kcap.capture.shards.lines import AnnotationLine, BatchLine, GraphLine, ProfiledLine, ProgramLine, StepLine
from kcap.capture.shards.reader import Shard
from kcap.schemas.recording.recording import PHASES, Count, GraphUse, Program, Step


@dataclass
class Batch:
    """Steps of one kind, on one rank."""

    rank: int
    program: bytes
    phase: int
    tokens: int
    sequences: int
    times: int


@dataclass
class FoldedProgram:
    """A Program: its items are signatures of Calls, or the keys of the graphs that were replayed between them."""

    key: bytes
    items: list[bytes]
    graph: bool = False
    size: int | None = None
    scope: GraphUse | None = None
    captured: int = 0
    profiled: bool = False
    counts: Counter[tuple[int, int]] = field(default_factory=Counter)


class Programs:
    """The Programs of all shards: equal ones of several ranks are one, and so are equal graphs."""

    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self._all: dict[bytes, FoldedProgram] = {}
        self._keys: dict[tuple[int, int], bytes] = {}  # a shard's own program -> its key
        self._graphs: dict[tuple[int, int], FoldedProgram] = {}  # a shard's own graph -> it
        self.graph_lines: dict[tuple[int, int], GraphLine] = {}
        self._own: dict[tuple[int, int], list[int]] = {}  # a shard's own program -> its own calls and graphs
        self._ended: dict[int, int] = {}
        self.batches: list[Batch] = []
        for index, shard in enumerate(fold.shards):
            self._add_graphs(index, shard)
            self._add_programs(index, shard)
            self._count_batches(index, shard)
            self._count_loose_graphs(index, shard)

    def _add_graphs(self, index: int, shard: Shard) -> None:
        annotations = {line.graph: line for line in shard.lines(AnnotationLine)}
        for line in shard.lines(GraphLine):
            if not all((index, call) in self._fold.of for call in line.calls):
                continue
            items = [self._fold.of[index, call] for call in line.calls]
            annotation = annotations.get(line.number)
            annotated = annotation.model_fields_set if annotation else set()
            size = annotation.size if annotation and "size" in annotated else line.size
            scope = annotation.scope if annotation and "scope" in annotated else line.scope
            graph = self._intern([f"graph {size} {scope}".encode(), *items], items)
            graph.graph, graph.size, graph.scope = True, size, scope
            graph.captured += 1
            self._graphs[index, line.id] = graph
            self.graph_lines[index, line.id] = line

    def _add_programs(self, index: int, shard: Shard) -> None:
        for line in shard.lines(ProgramLine):
            items = [item for call in line.calls if (item := self._item(index, call)) is not None]
            if len(items) == len(line.calls):
                self._keys[index, line.id] = self._intern(items, items).key
                self._own[index, line.id] = line.calls
        for profiled in shard.lines(ProfiledLine):
            if (key := self._keys.get((index, profiled.program))) is not None:
                self._all[key].profiled = True

    def _count_batches(self, index: int, shard: Shard) -> None:
        self._ended[index] = 0
        runs: Counter[tuple[int, int]] = Counter()  # of a program, in a phase
        for line in shard.lines(BatchLine):
            times = shard.batch_count(line.id)
            self._ended[index] += times
            key = self._keys.get((index, line.program))
            if not times or key is None:
                continue
            runs[line.program, line.phase] += times
            self._all[key].counts[line.phase, shard.rank] += times
            self.batches.append(Batch(shard.rank, key, line.phase, line.tokens, line.sequences, times))
        for (program, phase), times in runs.items():
            for call in self._own[index, program]:
                self._count(index, call, phase, times)

    def _item(self, index: int, call: int) -> bytes | None:
        graph = self._graphs.get((index, call))
        return graph.key if graph else self._fold.of.get((index, call))

    def _count(self, index: int, call: int, phase: int, times: int) -> None:
        graph = self._graphs.get((index, call))
        if graph is None:
            return self._fold.count(index, call, phase, times)
        graph.counts[phase, self._fold.shards[index].rank] += times
        for inner in self.graph_lines[index, call].calls:
            self._fold.count(index, inner, phase, times, "graph")

    def _count_loose_graphs(self, index: int, shard: Shard) -> None:
        for shard_index, number in self._graphs:
            if shard_index == index:
                for phase, times in enumerate(shard.loose_counts(number)):
                    if times:
                        self._count(index, number, phase, times)

    def _intern(self, identity: list[bytes], items: list[bytes]) -> FoldedProgram:
        key = hashlib.sha256(b"\n".join(identity)).digest()
        return self._all.setdefault(key, FoldedProgram(key, items))

    @cached_property
    def _kept(self) -> list[FoldedProgram]:
        """Those that ran or were profiled, and the graphs in them."""
        kept = {program.key: program for program in self._all.values() if program.counts or program.profiled}
        inner = [self._all[item] for program in kept.values() for item in program.items if self._is_graph(item)]
        return [*kept.values(), *{graph.key: graph for graph in inner if graph.key not in kept}.values()]

    def _is_graph(self, item: bytes) -> bool:
        return item in self._all and self._all[item].graph

    @cached_property
    def numbers(self) -> dict[bytes, int]:
        """The id of each Program in the Recording."""
        return {program.key: number for number, program in enumerate(self._kept)}

    def own_calls(self, index: int, own: int) -> list[int]:
        """A shard's own program: its calls and graphs by the shard's own numbers."""
        return self._own.get((index, own), [])

    def profiled_calls(self, index: int) -> set[tuple[int, int]]:
        """A shard's own calls in its profiled steps, those of replayed graphs among them, each with the phase."""
        ran: set[tuple[int, int]] = set()
        for line in self._fold.shards[index].lines(ProfiledLine):
            for call in self._own.get((index, line.program), []):
                graph = self.graph_lines.get((index, call))
                ran |= {(inner, line.phase) for inner in (graph.calls if graph else [call])}
        return ran

    def order(self) -> list[bytes]:
        """Every Call's signature in the order in which the Programs ran them."""
        return list(dict.fromkeys(call for program in self._kept for call in self._flat(program)))

    def _flat(self, program: FoldedProgram) -> list[bytes]:
        return [
            call
            for item in program.items
            for call in (self._all[item].items if not program.graph and self._is_graph(item) else [item])
        ]

    def records(self, ids: dict[bytes, int]) -> list[Program]:
        numbers = self.numbers
        return [self._record(program, number, ids, numbers) for number, program in enumerate(self._kept)]

    def _record(self, program: FoldedProgram, number: int, ids: dict[bytes, int], numbers: dict[bytes, int]) -> Program:
        calls: list[int] = []
        graphs: list[tuple[int, int]] = []
        for item in program.items:
            if not program.graph and self._is_graph(item):
                graphs.append((len(calls), numbers[item]))
            else:
                calls.append(ids[item])
        return Program(
            id=number,
            kind="graph" if program.graph else "step",
            calls=calls,
            graphs=graphs,
            size=program.size,
            scope=program.scope,
            captured=program.captured,
            counts=[
                Count(phase=PHASES[phase], rank=rank, mode="graph" if program.graph else "eager", count=times)
                for (phase, rank), times in sorted(program.counts.items())
            ],
        )

    def graph_use(self, key: bytes) -> tuple[GraphUse, int | None]:
        """How the step `key` used graphs, and the tokens that they were captured for."""
        graphs = [self._all[item] for item in self._all[key].items if self._is_graph(item)]
        if not graphs:
            return "eager", None
        padded = max((graph.size for graph in graphs if graph.size is not None), default=None)
        scopes = {graph.scope for graph in graphs}
        alone = scopes == {None} and len(graphs) == 1
        return "full" if "full" in scopes or alone else "piecewise", padded

    def steps(self, requests: Requests) -> list[Step]:
        """The steps that the shards list, of those that ended, with their `requests`."""
        steps = [
            self.step(index, line).model_copy(update={"requests": requests.places(index, line.requests)})
            for index, shard in enumerate(self._fold.shards)
            for line in shard.lines(StepLine)
            if line.index < self._ended[index] and (index, line.program) in self._keys
        ]
        return sorted(steps, key=lambda step: (step.rank, step.index))

    def step(self, index: int, line: StepLine | ProfiledLine) -> Step:
        """A shard's step, by the Recording's own ids."""
        key = self._keys.get((index, line.program))
        mode, padded = ("eager", None) if key is None else self.graph_use(key)
        return Step(
            index=line.index, rank=self._fold.shards[index].rank, phase=PHASES[line.phase], tokens=line.tokens,
            sequences=line.sequences, lengths=line.lengths, queries=line.queries, cached=line.cached,
            program=self.numbers.get(key or b""), mode=mode, padded=padded,
        )  # fmt: skip

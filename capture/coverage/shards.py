"""The coverage of a session: each process's trace held against the steps that its shard says were profiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kcap.capture.coverage.attribute import attribute
from kcap.capture.coverage.report import covered
from kcap.capture.coverage.steps import NOBODY, ProfiledStep, Ran, Replayed
from kcap.capture.coverage.trace import read_trace
from kcap.capture.folding import Fold
from kcap.capture.profiled import ENDING
from kcap.capture.programs import Programs
from kcap.capture.shards import Shard
from kcap.errors import FormatError
from kcap.schemas.coverage import StepCoverage
from kcap.schemas.recording import PHASES, Step

Line = dict[str, Any]


def cover(fold: Fold, programs: Programs, ids: dict[bytes, int]) -> tuple[list[StepCoverage], list[str]]:
    """The lines of coverage.jsonl, and what could not be read."""
    found: list[StepCoverage] = []
    notes: list[str] = []
    for index, shard in enumerate(fold.shards):
        path = shard.stem.with_name(shard.stem.name + ENDING)
        lines = shard.lines.get("profiled", [])
        if not lines and not path.is_file():
            continue
        try:
            found += _of_shard(index, shard, _Steps(fold, programs, ids))
        except FormatError as error:
            notes.append(f"coverage of process {shard.process.get('pid')}: {error}")
    return sorted(found, key=lambda step: (step.rank, step.index)), notes


def _of_shard(index: int, shard: Shard, steps: _Steps) -> Iterator[StepCoverage]:
    trace = read_trace(shard.stem.with_name(shard.stem.name + ENDING))
    names = {line["name"]: line["function"] for line in shard.lines.get("kernel_name", [])}
    trace.gpu = [event._replace(name=names.get(event.name, event.name)) for event in trace.gpu]
    lines = {line["index"]: line for line in shard.lines.get("profiled", [])}
    for attributed in attribute(trace, [steps.profiled(index, line) for line in lines.values()]):
        yield covered(attributed, steps.step(index, lines[attributed.index]))


class _Steps:
    """A shard's profiled steps, by the Recording's own ids."""

    def __init__(self, fold: Fold, programs: Programs, ids: dict[bytes, int]) -> None:
        self._fold, self._programs, self._ids = fold, programs, ids

    def step(self, index: int, line: Line) -> Step:
        program = self._programs.number(index, line["program"])
        mode, padded = self._programs.use_of(index, line["program"])
        fields = {**line, "phase": PHASES[line["phase"]], "program": program, "mode": mode, "padded": padded}
        return Step.model_validate({**fields, "rank": int(self._fold.shards[index].process.get("rank", 0))})

    def profiled(self, index: int, line: Line) -> ProfiledStep:
        calls = self._programs.own_calls(index, line["program"])
        return ProfiledStep(line["index"], [self._item(index, call) for call in calls])

    def _item(self, index: int, call: int) -> Ran | Replayed:
        graph = self._programs.graph_lines.get((index, call))
        return self._ran(index, call) if graph is None else self._replayed(index, graph)

    def _ran(self, index: int, call: int) -> Ran:
        line = self._fold.raw[index, call]
        function = (line.get("launch") or {}).get("function")
        number = self._ids[self._fold.of[index, call]]
        return Ran(number, line["operator"], function, line.get("kind") == "region")

    def _replayed(self, index: int, graph: Line) -> Replayed:
        calls = [self._ran(index, call) for call in graph["calls"]]
        ranges = graph.get("nodes") or []
        if len(ranges) != len(calls):
            return Replayed(calls)
        ordered, nodes = own_nodes(calls, [tuple(each) for each in ranges], graph.get("total", 0))
        return Replayed(ordered, nodes, graph.get("total", 0))


def own_nodes(calls: list[Ran], ranges: list[tuple[int, int]], total: int) -> tuple[list[Ran], list[int]]:
    """Each node of a graph given to the innermost call around it, in the nodes' order; NOBODY to those of no call.

    `ranges`: of the nodes numbered from 0 to `total`, the first that a call and the calls in it added, and one past
    the last.
    """
    owners: list[Ran] = [NOBODY] * total
    for ran, (start, end) in zip(calls, ranges, strict=True):  # what runs in a call comes after it
        owners[start:end] = [ran] * len(owners[start:end])
    ordered: list[Ran] = []
    counts: list[int] = []
    for owner in owners:
        if ordered and ordered[-1] is owner:
            counts[-1] += 1
        else:
            ordered.append(owner)
            counts.append(1)
    return ordered, counts

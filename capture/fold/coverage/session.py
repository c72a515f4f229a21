"""The coverage of a session: each process's trace held against the steps that its shard says were profiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kcap.capture.fold.calls import Fold
from kcap.capture.fold.coverage.attribute import attribute
from kcap.capture.fold.coverage.report import covered
from kcap.capture.fold.coverage.steps import ProfiledStep, Ran, Replayed
from kcap.capture.fold.coverage.trace import read_trace
from kcap.capture.fold.programs import Programs
from kcap.capture.session import PROFILE_ENDING
from kcap.capture.shards.reader import Shard
from kcap.errors import FormatError
from kcap.schemas.recording.recording import PHASES, Step
from kcap.schemas.results.coverage import StepCoverage

Line = dict[str, Any]


def session_coverage(fold: Fold, programs: Programs, ids: dict[bytes, int]) -> tuple[list[StepCoverage], list[str]]:
    """The lines of coverage.jsonl, and what could not be read."""
    found: list[StepCoverage] = []
    notes: list[str] = []
    for index, shard in enumerate(fold.shards):
        path = shard.stem.with_name(shard.stem.name + PROFILE_ENDING)
        lines = shard.lines.get("profiled", [])
        if not lines and not path.is_file():
            continue
        try:
            found += _of_shard(index, shard, _Steps(fold, programs, ids))
        except FormatError as error:
            notes.append(f"coverage of process {shard.process.get('pid')}: {error}")
    return sorted(found, key=lambda step: (step.rank, step.index)), notes


def _of_shard(index: int, shard: Shard, steps: _Steps) -> Iterator[StepCoverage]:
    trace = read_trace(shard.stem.with_name(shard.stem.name + PROFILE_ENDING))
    names = {line["name"]: line["function"] for line in shard.lines.get("kernel_name", [])}
    trace.gpu = [event._replace(name=names.get(event.name, event.name)) for event in trace.gpu]
    lines = {line["index"]: line for line in shard.lines.get("profiled", [])}
    for attributed in attribute(trace, [steps.profiled(index, line) for line in lines.values()]):
        line = lines[attributed.index]
        yield covered(attributed, steps.step(index, line), line.get("sm_mhz"))


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
        ranges = [(start, end) for start, end in graph.get("nodes") or ()]
        return Replayed(calls, total=graph.get("total", 0), ranges=ranges)

"""The coverage of a session: each process's trace held against the steps that its shard says were profiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kcap.capture.fold.calls import Fold
from kcap.capture.fold.coverage.attribute import attribute
from kcap.capture.fold.coverage.report import covered
from kcap.capture.fold.coverage.steps import ProfiledStep, Ran, Replayed
from kcap.capture.fold.coverage.trace import read_trace
from kcap.capture.fold.programs import Programs
from kcap.capture.session import PROFILE_ENDING
from kcap.capture.shards.lines import GraphLine, KernelNameLine, ProfiledLine
from kcap.capture.shards.reader import Shard
from kcap.errors import FormatError
from kcap.schemas.recording.operators import is_module_function
from kcap.schemas.results.coverage import StepCoverage


def session_coverage(fold: Fold, programs: Programs, ids: dict[bytes, int]) -> tuple[list[StepCoverage], list[str]]:
    """The lines of coverage.jsonl, and what could not be read."""
    coverage: list[StepCoverage] = []
    notes: list[str] = []
    for index, shard in enumerate(fold.shards):
        if not shard.lines(ProfiledLine) and not _trace_file(shard).is_file():
            continue
        try:
            coverage += _shard_coverage(index, shard, fold, programs, ids)
        except FormatError as error:
            notes.append(f"coverage of process {shard.pid}: {error}")
    return sorted(coverage, key=lambda step: (step.rank, step.index)), notes


def _trace_file(shard: Shard) -> Path:
    return shard.stem.with_name(shard.stem.name + PROFILE_ENDING)


def _shard_coverage(
    index: int, shard: Shard, fold: Fold, programs: Programs, ids: dict[bytes, int]
) -> Iterator[StepCoverage]:
    trace = read_trace(_trace_file(shard))
    functions = {line.name: line.function for line in shard.lines(KernelNameLine)}
    trace.gpu = [event._replace(name=functions.get(event.name, event.name)) for event in trace.gpu]

    def call(number: int) -> Ran:
        line = fold.lines[index, number]
        launch = None if is_module_function(line.operator) else line.launch  # it may launch any kernels
        function = launch.function if launch else None
        return Ran(ids[fold.of[index, number]], line.operator, function, line.kind == "region")

    def item(number: int) -> Ran | Replayed:
        graph: GraphLine | None = programs.graph_lines.get((index, number))
        return call(number) if graph is None else _replayed(graph, list(map(call, graph.calls)), functions)

    lines = {line.index: line for line in shard.lines(ProfiledLine)}
    steps = [
        ProfiledStep(line.index, list(map(item, programs.own_calls(index, line.program)))) for line in lines.values()
    ]
    for attributed in attribute(trace, steps):
        line = lines[attributed.index]
        yield covered(attributed, programs.step(index, line), line.sm_mhz)


def _replayed(graph: GraphLine, calls: list[Ran], functions: dict[str, str]) -> Replayed:
    kernels = [functions.get(name, name) for name in graph.node_names]
    return Replayed(calls, graph.total, graph.nodes, kernels, dict(graph.after))

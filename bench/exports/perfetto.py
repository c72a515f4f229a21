"""`perfetto`: the profiled steps as a timeline, which Perfetto and chrome://tracing open.

trace.json is in Chrome's trace format, times in microseconds: of each rank one row with the steps, below it the GPU's
kernels (in as many rows as overlap), and the launches on the host. Steps lie one after another, as the profiler did not
keep how long it was from one to the next. A kernel's arguments name the Call that launched it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from kcap.bench.exports import Exporter, ExportRequest, exporter
from kcap.errors import CallError
from kcap.schemas.recording.records import Call
from kcap.schemas.recording.signature import call_signature
from kcap.schemas.results import coverage
from kcap.schemas.results.coverage import KernelTime, StepCoverage
from kcap.schemas.results.export_loss import ExportLoss, LossLedger

FILE = "trace.json"
BETWEEN_US = 100.0  # from one step to the next
STEPS, HOST, GPU = 0, 1, 2  # rows; those of the GPU go on from the last
PROFILED = "it is shown in the profiled steps, which are not those that are counted"
NOT_PROFILED = "it ran in no profiled step"


@exporter("perfetto")
class Timeline(Exporter):
    """trace.json; CallError for a Recording without profiled steps."""

    takes = "steps"
    needs = "in a browser, at https://ui.perfetto.dev or chrome://tracing"

    def write(self, request: ExportRequest) -> ExportLoss:
        recording = request.contents.recording
        if recording is None or recording.metadata.coverage is None:
            raise CallError(f"{request.contents.path}: has no profiled steps: kcap record --check-coverage makes some")
        steps = list(coverage.read(recording.path / coverage.FILE))
        calls = {call.id: call for call in recording.calls}
        document = {"displayTimeUnit": "ns", "traceEvents": list(trace_events(steps, calls))}
        (request.output / FILE).write_bytes(orjson.dumps(document))
        shown = {kernel.call for step in steps for kernel in step.kernels}
        ledger = LossLedger()
        for call in request.contents.kernels:
            note = ledger.reduce if call.id in shown else ledger.lose
            note(call.operator, PROFILED if call.id in shown else NOT_PROFILED, call.total)
        return ledger.loss("perfetto", request.contents.total)

    def following(self, output: Path) -> str:
        return f"open {shlex.quote(str(output / FILE))}"


def trace_events(steps: list[StepCoverage], calls: Mapping[int, Call]) -> Iterator[dict[str, Any]]:
    """The events of all steps whose kernels have starts, with the names of their rows."""
    starts: dict[int, float] = {}
    rows: dict[int, int] = {}
    for step in steps:
        timed = [kernel for kernel in step.kernels if kernel.start_us is not None]
        if not timed:
            continue
        begin = starts.get(step.rank, 0.0) - min(0.0, *(kernel.launched_us or 0.0 for kernel in timed))
        end = max((kernel.start_us or 0.0) + kernel.us for kernel in timed)
        yield _step_event(step, begin, end)
        lanes: list[float] = []
        for kernel in timed:
            yield from _kernel_events(kernel, step.rank, begin, lanes, calls)
        rows[step.rank] = max(rows.get(step.rank, 0), len(lanes))
        starts[step.rank] = begin + end + BETWEEN_US
    for rank, lanes_used in rows.items():
        yield _name("process_name", rank, 0, f"rank {rank}")
        names = {STEPS: "steps", HOST: "launches"} | {GPU + lane: f"GPU {lane}" for lane in range(lanes_used)}
        yield from (_name("thread_name", rank, row, name) for row, name in names.items())


def _step_event(step: StepCoverage, begin: float, length: float) -> dict[str, Any]:
    facts = step.model_dump(include={"phase", "mode", "padded", "tokens", "sequences", "gpu_us", "sm_mhz"})
    return _event(f"{step.phase}, {step.sequences} × {step.mode}", step.rank, STEPS, begin, length, facts)


def _kernel_events(
    kernel: KernelTime, rank: int, begin: float, lanes: list[float], calls: Mapping[int, Call]
) -> Iterator[dict[str, Any]]:
    """The kernel in the first row that is free, and when the host launched it, where that is known."""
    start = kernel.start_us or 0.0
    lane = next((lane for lane, end in enumerate(lanes) if end <= start), len(lanes))
    lanes[lane : lane + 1] = [start + kernel.us]
    call = calls.get(kernel.call) if kernel.call is not None else None
    facts = {"kernel": kernel.name, "graph": kernel.graph, "reason": kernel.reason}
    if call is not None:
        facts |= {"call": call.id, "operator": call.operator, "arguments": call_signature(call)}
    name = call.operator if call is not None else kernel.name
    yield _event(name, rank, GPU + lane, begin + start, kernel.us, facts)
    if kernel.launched_us is not None and not kernel.graph:
        yield _event(name, rank, HOST, begin + kernel.launched_us, 1.0, {})


def _event(name: str, rank: int, row: int, start: float, length: float, facts: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in facts.items() if value is not None}
    return {"ph": "X", "name": name, "pid": rank, "tid": row, "ts": start, "dur": length, "args": known}


def _name(kind: str, rank: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": name}}

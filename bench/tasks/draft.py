"""From a Recording or a dataset to a task: Workloads with counts, times and floors, and the engine's kernel."""

from __future__ import annotations

import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from kcap.bench.contents import CheckTarget
from kcap.bench.exports.flashinfer_bench import kept_counts, write_problems
from kcap.bench.problems import Problem, problems_of_dataset
from kcap.bench.run.bench_run import choose_workloads
from kcap.bench.run.subject import RecordingSubject, Subject, open_subject
from kcap.bench.run.summary.baseline import Measured, measured_baseline, measurements_of
from kcap.bench.run.summary.summary import UNWEIGHED
from kcap.bench.tasks.folder import identity
from kcap.errors import CallError, FormatError, KcapError
from kcap.replay.datasets.workloads import UNCOUNTED_PHASES, workload_weights
from kcap.replay.roofline.ceilings import Ceilings, ceilings_of_device
from kcap.replay.roofline.cost import cost_of_workload
from kcap.replay.roofline.floor import floor_parts
from kcap.schemas.derive.cost import Cost
from kcap.schemas.derive.invocation import torch_dtype
from kcap.schemas.files.jsonfile import dump_json
from kcap.schemas.flashinfer.dataset import Dataset, invocations, is_sealed, seal_dataset
from kcap.schemas.flashinfer.definition import Definition, ScalarInput, Workload
from kcap.schemas.recording.phases import ALL_PHASES
from kcap.schemas.recording.records import Call, Metadata
from kcap.schemas.results.measurement import Measurement, read_measurements
from kcap.schemas.results.task import (
    HELD_OUT_FILE,
    Bound,
    EngineKernel,
    HeldOut,
    HeldOutSet,
    Room,
    Task,
    TaskWorkload,
)
from kcap.version import __version__

BASELINE_FOLDER = "baseline"
SUFFIXES = {"triton": ".py", "cpp": ".cpp"}
LAUNCHED = {"function", "grid", "constexprs", "num_warps", "num_stages"}
MOST_LAUNCHES = 16


@dataclass(frozen=True)
class TaskRequest:
    """What `kcap task` was asked for.

    `workloads`: of the Definition at most. `held_out`: how many of them to keep back, in the folder `held_out_to`.
    """

    path: Path
    definition: str
    output: Path
    workloads: int | None = None
    measurements: Path | None = None
    held_out: int = 0
    held_out_to: Path | None = None
    device: str | None = None
    trust: bool = False


@dataclass(frozen=True)
class TaskDraft:
    """A task, before it lies in any form. `sources`: of the engine's kernels, by their path in the folder.

    `sealed`: the references were exported by this user. `held_out`: the Problem of the Workloads kept back.
    """

    request: TaskRequest
    task: Task
    problem: Problem
    subject: Subject
    sealed: bool
    measurements: Sequence[Measurement] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    held_out: Problem | None = None

    @property
    def definition(self) -> Definition:
        return self.problem.definition

    @cached_property
    def example(self) -> str:
        """A Solution that passes: the reference."""
        return f"# definition: {self.definition.name}\n{self.definition.reference.strip()}\n"

    def write_dataset(self, folder: Path) -> None:
        """What the judge reads."""
        write_problems(folder, [self.problem])
        if self.sealed:
            seal_dataset(folder)

    def write_held_out(self, folder: Path) -> None:
        """The Workloads that were kept back, with what they are judged by."""
        if self.held_out is None:
            return
        write_problems(folder, [self.held_out])
        if self.sealed:
            seal_dataset(folder)
        kept = HeldOutSet(definition=self.definition.name, identity=self.task.identity)
        (folder / HELD_OUT_FILE).write_bytes(dump_json(kept.model_dump(mode="json")))


def definition_rows(path: Path, trust: bool) -> list[tuple[str, str, int, int]]:
    """Each Definition of `path` that has Workloads: its name, its type, how many, and its invocations; those first that
    ran most often."""
    subject = open_subject(path, trust)
    counts = invocations(subject.counts)
    rows = [
        (name, definition.op_type, len(subject.workloads[name]), counts[name])
        for name, definition in subject.definitions.items()
        if subject.workloads.get(name)
    ]
    return sorted(rows, key=lambda row: (-row[3], row[0]))


def draft_task(request: TaskRequest) -> TaskDraft:
    """CallError where the call cannot work; KcapError where the Definition's reference is at fault."""
    if request.measurements is not None and not request.measurements.is_file():
        raise CallError(f"{request.measurements}: no such file (kcap replay PATH -o {request.measurements} writes one)")
    subject = open_subject(request.path, request.trust)
    definition = _find_definition(subject, request.definition)
    sealed = isinstance(subject, RecordingSubject) or is_sealed(request.path)
    with tempfile.TemporaryDirectory(prefix="kcap-task-") as folder:
        on = CheckTarget(request.device, request.trust)
        prepared = subject.prepare({definition.name}, Path(folder), on)
        if definition.name in prepared.faults:
            raise KcapError(f"{definition.name}: {prepared.faults[definition.name]}: no task is made of it")
        whole = _problem(Dataset.load_problems(prepared.root), definition.name)
    weights = workload_weights(subject.counts)
    chosen = [workload.uuid for workload in choose_workloads(subject, weights, request.workloads)[definition.name]]
    held_out = choose_held_out(chosen, request.held_out)
    problem = _part(whole, [uuid for uuid in chosen if uuid not in held_out])
    lines = list(read_measurements(request.measurements)) if request.measurements else []
    measured = measured_baseline(lines, subject.counts, subject.calls) if lines else None
    of_task = measurements_of(lines, problem.counts, subject.calls)
    sources = dict(_sources(subject, problem))
    draft = TaskDraft(
        request,
        _task(request, subject, problem, measured, of_task, sources),
        problem,
        subject,
        sealed,
        of_task,
        dict(sources.values()),
        _part(whole, held_out) if held_out else None,
    )
    return replace(draft, task=draft.task.model_copy(update={"identity": _identity(draft), "held_out": _kept(draft)}))


def _find_definition(subject: Subject, name: str) -> Definition:
    if name not in subject.definitions:
        near = get_close_matches(name, subject.definitions, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"kcap task {subject.path} lists those that there are"
        raise CallError(f"--definition {name}: {subject.path} has no such Definition: {hint}")
    if not subject.workloads.get(name):
        raise CallError(f"--definition {name}: {subject.path} has no Workloads of it")
    return subject.definitions[name]


def _problem(dataset: Dataset, name: str) -> Problem:
    """The Definition `name` of `dataset` alone."""
    counts = [count for count in dataset.counts if count.definition == name]
    alone = Dataset(dataset.root, {name: dataset.definitions[name]}, {name: dataset.workloads[name]}, counts=counts)
    return problems_of_dataset(alone)[0]


def _part(problem: Problem, uuids: Sequence[str]) -> Problem:
    """`problem` with the Workloads `uuids` alone, in this order; they stand for all invocations of their Calls."""
    workloads = {uuid: problem.workloads[uuid] for uuid in uuids}
    blobs = {uuid: problem.blobs[uuid] for uuid in uuids if uuid in problem.blobs}
    return replace(problem, workloads=workloads, blobs=blobs, counts=kept_counts(problem.counts, workloads))


def choose_held_out(uuids: Sequence[str], number: int) -> list[str]:
    """`number` of the Workloads, spread over all from the second most counted to the least; the same each time.

    CallError where fewer than one would be left.
    """
    if number >= len(uuids):
        raise CallError(
            f"--held-out {number}: the Definition has {len(uuids)} Workloads, and one at least has to be left"
        )
    rest = uuids[1:]
    return [rest[(2 * part + 1) * len(rest) // (2 * number)] for part in range(number)]


def _kept(draft: TaskDraft) -> HeldOut | None:
    if draft.held_out is None or draft.request.held_out_to is None:
        return None
    return HeldOut(workloads=len(draft.held_out.workloads), path=str(draft.request.held_out_to.resolve()))


def _identity(draft: TaskDraft) -> str:
    with tempfile.TemporaryDirectory(prefix="kcap-task-") as folder:
        draft.write_dataset(Path(folder))
        return identity(Dataset.load_problems(Path(folder)), draft.definition.name)


def _task(
    request: TaskRequest,
    subject: Subject,
    problem: Problem,
    measured: Measured | None,
    lines: Sequence[Measurement],
    sources: Mapping[str, tuple[str, str]],
) -> Task:
    metadata = subject.metadata or Metadata()
    name = problem.definition.name
    workloads = list(_workloads(problem, measured, lines, metadata.device))
    devices = sorted({line.device_name for line in lines if line.device_name})
    return Task(
        kcap=__version__,
        definition=name,
        op_type=problem.definition.op_type,
        model=metadata.model,
        framework=metadata.framework,
        framework_version=metadata.framework_version,
        recorded_on=metadata.device,
        device=request.device or subject.home,
        measured_on=", ".join(devices) or None,
        identity="",
        invocations=sum(sum(workload.counts.values()) for workload in workloads),
        steps=metadata.steps,
        kernels=_kernels(subject, problem, sources),
        baseline=measured.title if measured and any(workload.engine_us for workload in workloads) else None,
        totals=measured.totals if measured else {},
        workloads=workloads,
        room=room_of(workloads, measured.totals if measured else {}),
        notes=list(_notes(metadata, problem, measured, workloads)),
    )


def _workloads(
    problem: Problem, measured: Measured | None, lines: Sequence[Measurement], recorded_on: str | None
) -> Iterator[TaskWorkload]:
    weights = workload_weights(problem.counts)
    name = problem.definition.name
    total = sum(sum(weights.get((name, uuid), UNCOUNTED_PHASES).values()) for uuid in problem.workloads) or 1
    # Its counts are of the Workloads that are left, so that the times are too
    times = measured_baseline(lines, problem.counts, ()).times if measured and lines else {}
    ceilings, measured_floors = _ceilings(lines, recorded_on), _floors(problem, lines)
    for uuid, workload in problem.workloads.items():
        counts = dict(weights.get((name, uuid), UNCOUNTED_PHASES))
        cost = workload_cost(problem.definition, workload, problem.blobs.get(uuid, {}))
        bytes_us, flops_us = floor_parts(cost, ceilings, "cold") if cost and ceilings else (0.0, 0.0)
        floor = measured_floors.get(uuid) or max(bytes_us, flops_us)
        yield TaskWorkload(
            workload=uuid,
            axes=workload.axes,
            counts=counts,
            share=sum(counts.values()) / total,
            engine_us={phase: us / counts[phase] for phase, us in times.get((name, uuid), {}).items() if counts[phase]},
            floor_us=floor or None,
            bytes=cost.bytes if cost else None,
            flops=cost.flops if cost else None,
            dtype=cost.dtype if cost else "",
            bound=bound_of(bytes_us, flops_us),
        )


def _floors(problem: Problem, lines: Sequence[Measurement]) -> dict[str, float]:
    """By Workload, the floor that was found when the engine's kernel was timed."""
    by_call: dict[int | str, list[float]] = defaultdict(list)
    for line in lines:
        key = line.call if line.workload is None else line.workload
        if key is not None and line.roofline is not None:
            by_call[key].append(line.roofline.us)
    calls: dict[str, list[float]] = defaultdict(list)
    for count in problem.counts:
        calls[count.workload] += by_call.get(count.call, []) + by_call.get(count.workload, [])
    return {uuid: fmean(floors) for uuid, floors in calls.items() if floors}


def bound_of(bytes_us: float, flops_us: float) -> Bound | None:
    """Which of the two floors is the higher; None where neither is known."""
    if not bytes_us and not flops_us:
        return None
    return "memory" if bytes_us >= flops_us else "compute"


def workload_cost(definition: Definition, workload: Workload, blob: Mapping[str, Any]) -> Cost | None:
    """What one invocation must move and compute. Random inputs take no memory here: only their sizes count."""
    inputs: dict[str, Any] = {}
    for name, tensor in definition.inputs.items():
        workload_input = workload.inputs.get(name)
        if isinstance(workload_input, ScalarInput):
            inputs[name] = workload_input.value
        elif name in blob:
            inputs[name] = blob[name]
        elif workload_input is not None and tensor.shape is not None:
            with suppress(ValueError, AttributeError):  # an axis without a size; a dtype that this torch lacks
                sizes = definition.sizes(tensor.shape, workload.axes)
                inputs[name] = torch.empty(sizes, dtype=torch_dtype(tensor.dtype), device="meta")
    return cost_of_workload(definition, inputs)


def _ceilings(lines: Sequence[Measurement], recorded_on: str | None) -> Ceilings | None:
    """Of the device that was measured, else of the one that was recorded on; None where none are known here."""
    names = {line.device_name for line in lines if line.device_name} or {recorded_on or ""}
    return ceilings_of_device(names.pop()) if len(names) == 1 else None


def room_of(workloads: Iterable[TaskWorkload], totals: Mapping[str, float]) -> dict[str, Room]:
    """By phase and over all, what the engine's kernel takes, and what it would at the floor. Only Workloads count whose
    time and floor are known."""
    engine: dict[str, list[float]] = defaultdict(list)
    floors: dict[str, list[float]] = defaultdict(list)
    for workload in workloads:
        for phase, us in workload.engine_us.items():
            if workload.floor_us is not None:
                for name in (phase, ALL_PHASES):
                    engine[name].append(us * workload.counts[phase])
                    floors[name].append(min(workload.floor_us, us) * workload.counts[phase])
    whole = {**totals, ALL_PHASES: sum(totals.values())} if totals else {}
    room = {}
    for phase in engine:
        now, least, total = sum(engine[phase]), sum(floors[phase]), whole.get(phase)
        room[phase] = Room(
            engine_us=now, floor_us=least, total_us=total, share=(now - least) / total if total else None
        )
    return room


def _kernels(subject: Subject, problem: Problem, sources: Mapping[str, tuple[str, str]]) -> list[EngineKernel]:
    """The most invoked first."""
    calls = _calls_of(subject, problem)
    totals: Counter[str] = Counter()
    for operator, _, count in {
        (count.operator, count.call, sum(phase.count for phase in count.counts)) for count in problem.counts
    }:
        totals[operator] += count
    return [
        EngineKernel(
            operator=operator,
            invocations=number,
            language=next((call.launch.language for call in calls[operator] if call.launch), "operator"),
            source=sources[operator][0] if operator in sources else None,
            launches=_launches(calls[operator]),
        )
        for operator, number in sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    ]


def _calls_of(subject: Subject, problem: Problem) -> dict[str, list[Call]]:
    """By operator, the Calls that the Workloads stand for; none of a dataset."""
    by_id = {call.id: call for call in subject.calls}
    calls: dict[str, list[Call]] = {count.operator: [] for count in problem.counts}
    for operator, call in dict.fromkeys((count.operator, count.call) for count in problem.counts):
        calls[operator] += [by_id[call]] if call in by_id else []
    return calls


def _launches(calls: Iterable[Call]) -> list[dict[str, Any]]:
    launches = [call.launch.model_dump(mode="json", include=LAUNCHED) for call in calls if call.launch is not None]
    return [launch for number, launch in enumerate(launches) if launch not in launches[:number]][:MOST_LAUNCHES]


def _sources(subject: Subject, problem: Problem) -> Iterator[tuple[str, tuple[str, str]]]:
    """By operator, the path in the folder and the text of a kernel whose source the Recording has."""
    recording = subject.contents.recording if isinstance(subject, RecordingSubject) else None
    for operator, calls in _calls_of(subject, problem).items():
        for call in calls[:1]:
            if recording is not None and call.launch is not None and call.launch.language in SUFFIXES:
                name = re.sub(r"[^\w.-]", "_", operator.rpartition("::")[2]).lstrip(".")
                with suppress(FormatError):
                    source = recording.source(call.launch)
                    yield operator, (f"{BASELINE_FOLDER}/{name}{SUFFIXES[call.launch.language]}", source)


def _notes(
    metadata: Metadata, problem: Problem, measured: Measured | None, workloads: Sequence[TaskWorkload]
) -> Iterator[str]:
    recorded, model = metadata.layers_recorded, metadata.layers_model
    if recorded is not None and model is not None and recorded < model:
        yield f"{recorded} of the model's {model} layers were recorded: shares are not the model's"
    if not problem.counts:
        yield UNWEIGHED
    if measured is None:
        yield "the engine's own times are not known (kcap task --measurements): gains are against the reference"
    elif measured and not any(workload.engine_us for workload in workloads):
        yield "its calls have no times of their own in the measurements: gains are against the reference"
    elif untimed := sum(not workload.engine_us for workload in workloads):
        yield f"{untimed} of the {len(workloads)} Workloads have no time of the engine's: nothing is gained on them"


def mean_us(times: Mapping[str, float], counts: Mapping[str, int]) -> float | None:
    """One invocation of several phases' times."""
    weighed = [(times[phase], counts.get(phase, 0)) for phase in times]
    total = sum(count for _, count in weighed)
    if not total:
        return fmean(times.values()) if times else None
    return sum(us * count for us, count in weighed) / total

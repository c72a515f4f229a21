"""The chosen Calls of a Recording, a trace file or a parquet, each with the Samples that it needs.

Lines of a trace file with the same signature are one Call with their summed count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import orjson

from kcap.errors import CallError
from kcap.replay.jobs import CallJob, Choice, ReplaySession, SampleGroup, Source
from kcap.schemas.backendbench import Problems, TraceLine
from kcap.schemas.input_kind import detect_input, trace_lines
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.recording import Argument, Call, Count, Recording, Sample, load
from kcap.schemas.recording.values import Drift, Value, encode


def open_source(path: Path, choice: Choice, keep_going: bool, trust: bool = False) -> Source:
    """What to replay of `path`: a Recording, a trace file, a parquet or, with `trust`, a dataset.

    CallError or FormatError say why it cannot be replayed.
    """
    kind = detect_input(path)
    if keep_going and kind in ("dataset", "recording"):
        raise CallError(f"{path} is no trace file: --keep-going is of the lines of one")
    if kind == "dataset":
        from kcap.replay.datasets.workloads import open_dataset  # needs torch

        return open_dataset(path, choice, trust)
    problems = Problems() if keep_going else None
    recording = load(path) if kind == "recording" else None
    calls = recording.calls if recording else calls_of_trace(path, problems)
    if not calls:
        raise CallError(f"{path}: holds no calls")
    samples = samples_by_call(recording.samples) if recording else {}
    jobs = [job for call in calls if is_chosen(call, choice) and (job := _call_job(call, samples, choice)).count]
    if not jobs:
        raise CallError(f"{path}: none of its {len(calls)} calls matches --op or --phase (kcap show {path} lists them)")
    jobs.sort(key=lambda job: (-job.count, job.call.id))
    jobs = jobs[: choice.top]
    session = replay_session(recording, calls, (job.call for job in jobs), trust)
    return Source(path, jobs, session, bad_lines=problems.lines if problems else 0)


def replay_session(
    recording: Recording | None, calls: Iterable[Call], replayed: Iterable[Call], trust: bool
) -> ReplaySession:
    """The session of a worker that replays some of `calls`, which are those of `recording` or of a trace file."""
    return ReplaySession(
        home=home_device(calls),
        root=str(recording.path.resolve()) if recording else None,
        operators=registered_operators(replayed),
        trust=trust,
    )


def is_chosen(call: Call, choice: Choice) -> bool:
    """Regions are never replayed: the kernels inside count on their own."""
    if call.kind == "region" or not (call.work or choice.views):
        return False
    return choice.takes(call.operator)


def registered_operators(calls: Iterable[Call]) -> list[str]:
    """The operators of `calls` that a library registers, or torch: for a worker to import ahead."""
    return sorted({call.operator for call in calls if call.launch is None})


def home_device(calls: Iterable[Call]) -> str | None:
    devices = {spec.device.split(":")[0] for call in calls for _, spec in call.tensors()}
    return "cuda" if "cuda" in devices else "cpu" if "cpu" in devices else None


Samples: TypeAlias = "Mapping[int, list[tuple[int, Sample]]]"  # by Call, each with its line in samples.jsonl


def samples_by_call(samples: Iterable[Sample], compared: bool = False) -> Samples:
    """With the line of each. `compared`: also those that stand for a profiled step alone."""
    by_call: dict[int, list[tuple[int, Sample]]] = {}
    for index, sample in enumerate(samples):
        if compared or not sample.compared:
            by_call.setdefault(sample.call, []).append((index, sample))
    return by_call


def _call_job(call: Call, samples: Samples, choice: Choice) -> CallJob:
    phases = [count.phase for count in call.counts if choice.phase in (None, count.phase)]
    counts: dict[str, int] = {phase: call.counted(phase) for phase in phases}
    matching = [(i, s) for i, s in samples.get(call.id, []) if choice.phase in (None, s.phase)]
    return CallJob(counts, call, group_samples(matching) if needs_sample(call) else [SampleGroup(None, None)])


def group_samples(samples: Iterable[tuple[int, Sample]]) -> list[SampleGroup]:
    """Group the Samples with the same values; at least one group."""
    groups: dict[bytes, SampleGroup] = {}
    for index, sample in samples:
        values = sample.model_dump(mode="json", include={"scalars", "offsets", "tensors"})
        group = groups.setdefault(orjson.dumps(values, option=orjson.OPT_SORT_KEYS), SampleGroup(sample, index))
        if sample.phase not in group.phases:
            group.phases.append(sample.phase)
    return list(groups.values()) or [SampleGroup(None, None)]


def needs_sample(call: Call) -> bool:
    """Whether a scalar or an offset drifts, or integer values matter to it."""
    ints = any(BY_NAME[spec.dtype].kind == "int" or spec.offset is None for _, spec in call.tensors())
    return ints or any(_drifts(argument.value) for argument in call.args)


def _drifts(value: Value) -> bool:
    return isinstance(value, Drift) or (isinstance(value, list) and any(_drifts(item) for item in value))


def calls_of_trace(path: Path, problems: Problems | None) -> list[Call]:
    """The Calls of the file `path`; bad lines are counted in `problems`, or raise FormatError without one."""
    return merge_lines(trace_lines(path, problems))


def merge_lines(lines: Iterable[TraceLine]) -> list[Call]:
    merged: dict[bytes, Call] = {}
    for line in lines:
        call = call_of_line(line, len(merged))
        key = orjson.dumps([call.operator, [[a.name, encode(a.value)] for a in call.args]])
        previous = merged.get(key)
        total = line.count + (previous.total if previous else 0)
        merged[key] = (previous or call).model_copy(update={"counts": [Count(phase="other", count=total)]})
    return list(merged.values())


def call_of_line(line: TraceLine, number: int) -> Call:
    """The Call of one line; positional arguments have no names here, the operator's schema names them at replay."""
    args = [Argument(value=value) for value in line.args]
    args += [Argument(name=name, value=value, keyword=True) for name, value in line.kwargs.items()]
    return Call(id=number, operator=line.name, args=args, counts=[Count(phase="other", count=line.count)])

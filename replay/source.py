"""The Calls of a Recording, a trace file or a parquet to replay, chosen, and each with the Samples that it needs.

In a trace file a signature on several lines is one Call with their summed count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import orjson

from kcap.errors import CallError
from kcap.replay.jobs import CallJob, Choice, SampleGroup, Source
from kcap.schemas.backendbench import Problems, TraceLine
from kcap.schemas.input_kind import detect_input, trace_lines
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.recording import Argument, Call, Count, Sample, load
from kcap.schemas.recording.values import Drift, Value, encode


def open_source(path: Path, choice: Choice, keep_going: bool, trust: bool = False) -> Source:
    """Read `path`, a Recording, a trace file, a parquet or, with `trust`, a dataset; CallError or FormatError say what
    is wrong with it."""
    kind = detect_input(path)
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
    session = {
        "home": home_device(calls),
        "root": str(path.resolve()) if recording else None,
        "namespaces": sorted({job.call.namespace for job in jobs}),
        "trust": trust,
    }
    return Source(path, jobs, session, bad_lines=problems.lines if problems else 0)


def is_chosen(call: Call, choice: Choice) -> bool:
    """Regions are never replayed: what runs in them counts on its own."""
    if call.kind == "region" or not (call.work or choice.views):
        return False
    return choice.takes(call.operator)


def home_device(calls: Iterable[Call]) -> str | None:
    devices = {spec.device.split(":")[0] for call in calls for _, spec in call.tensors()}
    return "cuda" if "cuda" in devices else "cpu" if "cpu" in devices else None


Samples: TypeAlias = "Mapping[int, list[tuple[int, Sample]]]"  # by Call, each with its place in the Recording


def samples_by_call(samples: Iterable[Sample]) -> Samples:
    found: dict[int, list[tuple[int, Sample]]] = {}
    for index, sample in enumerate(samples):
        found.setdefault(sample.call, []).append((index, sample))
    return found


def _call_job(call: Call, samples: Samples, choice: Choice) -> CallJob:
    counts: dict[str, int] = {}
    for count in call.counts:
        if choice.phase in (None, count.phase):
            counts[count.phase] = counts.get(count.phase, 0) + count.count
    matching = [(i, s) for i, s in samples.get(call.id, []) if choice.phase in (None, s.phase)]
    return CallJob(counts, call, group_samples(matching) if needs_sample(call) else [SampleGroup(None, None)])


def group_samples(samples: Iterable[tuple[int, Sample]]) -> list[SampleGroup]:
    """Samples that hold the same join; at least one group."""
    groups: dict[bytes, SampleGroup] = {}
    for index, sample in samples:
        held = sample.model_dump(mode="json", include={"scalars", "offsets", "tensors"})
        one = groups.setdefault(orjson.dumps(held, option=orjson.OPT_SORT_KEYS), SampleGroup(sample, index))
        if sample.phase not in one.phases:
            one.phases.append(sample.phase)
    return list(groups.values()) or [SampleGroup(None, None)]


def needs_sample(call: Call) -> bool:
    """Whether a scalar or an offset drifts, or integer values matter."""
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
        known = merged.get(key)
        total = line.count + (known.total if known else 0)
        merged[key] = (known or call).model_copy(update={"counts": [Count(phase="other", count=total)]})
    return list(merged.values())


def call_of_line(line: TraceLine, number: int) -> Call:
    """One line; positional arguments have no names here, the operator's schema gives them at replay."""
    args = [Argument(value=value) for value in line.args]
    args += [Argument(name=name, value=value, keyword=True) for name, value in line.kwargs.items()]
    return Call(id=number, operator=line.name, args=args, counts=[Count(phase="other", count=line.count)])

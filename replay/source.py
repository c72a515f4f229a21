"""The Calls of a Recording or a trace file to replay, chosen, and each with the Samples that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import orjson

from kcap.errors import CallError
from kcap.replay import trace
from kcap.replay.call_job import CallJob, Group
from kcap.replay.definitions.source import open_dataset
from kcap.replay.job import Choice, Source
from kcap.schemas.backendbench import Problems
from kcap.schemas.dtypes import BY_NAME
from kcap.schemas.recording import Call, Sample, load
from kcap.schemas.source import detect
from kcap.schemas.values import Drift, Value


def open_source(path: Path, choice: Choice, keep_going: bool, trust: bool = False) -> Source:
    """Read `path`, a Recording, a trace file, a parquet or, with `trust`, a dataset; CallError or FormatError say what
    is wrong with it."""
    kind = detect(path)
    if kind == "dataset":
        return open_dataset(path, choice, trust)
    problems = Problems() if keep_going else None
    recording = load(path) if kind == "recording" else None
    calls = recording.calls if recording else trace.calls(path, problems)
    if not calls:
        raise CallError(f"{path}: holds no calls")
    samples = by_call(recording.samples) if recording else {}
    jobs = [job for call in calls if wanted(call, choice) and (job := _job(call, samples, choice)).count]
    if not jobs:
        raise CallError(f"{path}: none of its {len(calls)} calls matches --op or --phase (kcap show {path} lists them)")
    jobs.sort(key=lambda job: (-job.count, job.call.id))
    jobs = jobs[: choice.top]
    session = {
        "home": home_of(calls),
        "root": str(path.resolve()) if recording else None,
        "namespaces": sorted({job.call.namespace for job in jobs}),
        "trust": trust,
    }
    return Source(path, jobs, session, bad_lines=problems.lines if problems else 0)


def wanted(call: Call, choice: Choice) -> bool:
    """Regions are never replayed: what runs in them counts on its own."""
    if call.kind == "region" or not (call.work or choice.views):
        return False
    return choice.takes(call.operator)


def home_of(calls: Iterable[Call]) -> str | None:
    devices = {spec.device.split(":")[0] for call in calls for _, spec in call.tensors()}
    return "cuda" if "cuda" in devices else "cpu" if "cpu" in devices else None


Samples: TypeAlias = "Mapping[int, list[tuple[int, Sample]]]"  # by Call, each with its place in the Recording


def by_call(samples: Iterable[Sample]) -> Samples:
    found: dict[int, list[tuple[int, Sample]]] = {}
    for index, sample in enumerate(samples):
        found.setdefault(sample.call, []).append((index, sample))
    return found


def _job(call: Call, samples: Samples, choice: Choice) -> CallJob:
    counts: dict[str, int] = {}
    for count in call.counts:
        if choice.phase in (None, count.phase):
            counts[count.phase] = counts.get(count.phase, 0) + count.count
    matching = [(i, s) for i, s in samples.get(call.id, []) if choice.phase in (None, s.phase)]
    return CallJob(counts, call, group(matching) if needs_sample(call) else [Group(None, None)])


def group(samples: Iterable[tuple[int, Sample]]) -> list[Group]:
    """Samples that hold the same join; at least one group."""
    groups: dict[bytes, Group] = {}
    for index, sample in samples:
        held = sample.model_dump(mode="json", include={"scalars", "offsets", "tensors"})
        one = groups.setdefault(orjson.dumps(held, option=orjson.OPT_SORT_KEYS), Group(sample, index))
        if sample.phase not in one.phases:
            one.phases.append(sample.phase)
    return list(groups.values()) or [Group(None, None)]


def needs_sample(call: Call) -> bool:
    """Whether a scalar or an offset drifts, or integer values matter."""
    ints = any(BY_NAME[spec.dtype].kind == "int" or spec.offset is None for _, spec in call.tensors())
    return ints or any(_drifts(argument.value) for argument in call.args)


def _drifts(value: Value) -> bool:
    return isinstance(value, Drift) or (isinstance(value, list) and any(_drifts(item) for item in value))

"""Folds the shards of a session into the Recording, and derives the calling record and the trace file from it."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import save

from kcap import __version__
from kcap.capture.config import Session
from kcap.capture.folding import Fold
from kcap.capture.lines import sound
from kcap.capture.redact import redact_arguments, redact_command
from kcap.capture.shards import (
    CLOSED,
    FAILED,
    LOOSE_STEPS,
    OFF_STEP,
    OVERFLOW,
    SAMPLES_SKIPPED,
    TRACED,
    Shard,
    read_shard,
    stems,
)
from kcap.schemas.recording import (
    PHASES,
    Count,
    Metadata,
    Program,
    Recording,
    Sample,
    SampledTensor,
    Step,
    Tap,
    load,
    write_recording,
)
from kcap.schemas.values import decode

SAMPLES_PER_CALL = 4


def merge(session: Session, output: Path) -> Recording:
    """Write the Recording of `session` into `output`; it says what failed, and may be empty."""
    shards = [sound(read_shard(stem)) for stem in stems(Path(session.directory))]
    fold = Fold(shards)
    programs = _Programs(fold)
    fold.count_loose()
    calls, ids = fold.calls(programs.order())
    samples, values = _samples(fold, ids)
    metadata = _metadata(session, shards, programs)
    metadata.totals = _totals(calls)
    write_recording(output, metadata, calls, programs.records(ids), programs.steps(), samples, values)
    recording = load(output)
    _derive(recording)
    return recording


def _derive(recording: Recording) -> None:
    from kcap.schemas import backendbench, calling_record

    record = calling_record.from_recording(recording)
    if record is not None:
        calling_record.write(recording.path / "calling_record.json", record)
    lines, loss = backendbench.from_recording(recording)
    backendbench.write(recording.path / "trace.txt", lines, loss)


@dataclass
class _Batch:
    rank: int
    program: bytes
    phase: int
    tokens: int
    sequences: int
    times: int


class _Programs:
    """The Programs of all shards, folded: equal ones of several ranks are one."""

    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self._calls: dict[bytes, list[bytes]] = {}
        self._counts: dict[bytes, Counter[tuple[int, int]]] = {}
        self._ended: dict[int, int] = {}
        self._keys: dict[tuple[int, int], bytes] = {}  # a shard's own program -> its key
        self.batches: list[_Batch] = []
        for index, shard in enumerate(fold.shards):
            self._add(index, shard)

    def _add(self, index: int, shard: Shard) -> None:
        rank = int(shard.process.get("rank", 0))
        own: dict[int, list[int]] = {}
        for line in shard.lines.get("program", []):
            if all((index, call) in self._fold.of for call in line["calls"]):
                self._keys[index, line["id"]] = self._intern(index, line["calls"])
                own[line["id"]] = line["calls"]
        self._ended[index] = 0
        for line in shard.lines.get("batch", []):
            times = shard.batch_count(line["id"])
            self._ended[index] += times
            key = self._keys.get((index, line["program"]))
            if not times or key is None:
                continue
            self._counts[key][line["phase"], rank] += times
            self.batches.append(_Batch(rank, key, line["phase"], line["tokens"], line["sequences"], times))
            for call in own[line["program"]]:
                self._fold.count(index, call, line["phase"], times)

    def _intern(self, index: int, calls: list[int]) -> bytes:
        signatures = [self._fold.of[index, call] for call in calls]
        key = hashlib.sha256(b"\n".join(signatures)).digest()
        self._calls.setdefault(key, signatures)
        self._counts.setdefault(key, Counter())
        return key

    def _ran(self) -> list[bytes]:
        return [key for key, counts in self._counts.items() if counts]

    def order(self) -> list[bytes]:
        """Every Call's signature in the order in which the Programs ran them."""
        return list(dict.fromkeys(call for key in self._ran() for call in self._calls[key]))

    def records(self, ids: dict[bytes, int]) -> list[Program]:
        return [
            Program(
                id=number,
                calls=[ids[call] for call in self._calls[key]],
                counts=[
                    Count(phase=PHASES[phase], rank=rank, count=times)
                    for (phase, rank), times in sorted(self._counts[key].items())
                ],
            )
            for number, key in enumerate(self._ran())
        ]

    def steps(self) -> list[Step]:
        numbers = {key: number for number, key in enumerate(self._ran())}
        out = []
        for index, shard in enumerate(self._fold.shards):
            for line in shard.lines.get("step", []):
                key = self._keys.get((index, line["program"]))
                if line["index"] >= self._ended[index] or key is None:
                    continue
                fields = {**line, "phase": PHASES[line["phase"]], "program": numbers.get(key)}
                out.append(Step.model_validate({**fields, "rank": int(shard.process.get("rank", 0))}))
        return sorted(out, key=lambda step: (step.rank, step.index))


def _samples(fold: Fold, ids: dict[bytes, int]) -> tuple[list[Sample], dict[str, bytes]]:
    """At most SAMPLES_PER_CALL Samples a Call, phase and rank, spread over the steps, and the values they name."""
    found: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for index, shard in enumerate(fold.shards):
        rank = int(shard.process.get("rank", 0))
        latest = {(line["call"], line["phase"], line["slot"]): line for line in shard.lines.get("sample", [])}
        sampled = {(line["call"], line["phase"]) for line in latest.values()}
        lines = [*latest.values(), *_bare(fold, index, sampled)]
        drawn = Counter((line["call"], line["phase"]) for line in lines)
        for line in lines:
            number = ids.get(fold.of.get((index, line["call"]), b""))
            if number is not None:
                scalars, offsets = fold.drifted(index, line["call"])
                both = {
                    "scalars": {**scalars, **line.get("scalars", {})},
                    "offsets": {**offsets, **line.get("offsets", {})},
                }
                invocations = fold.invocations[index, line["call"], line["phase"]]
                weight = invocations / drawn[line["call"], line["phase"]]
                found.setdefault((number, line["phase"], rank), []).append({**line, **both, "weight": weight})
    values: dict[str, bytes] = {}
    samples = [
        _sample(line, number, phase, rank, values)
        for (number, phase, rank), lines in sorted(found.items())
        for line in _spread(lines)
    ]
    return samples, values


def _bare(fold: Fold, index: int, sampled: set[tuple[int, int]]) -> list[dict[str, Any]]:
    """A line for each call whose only values are the scalars that its fold leaves out."""
    out = []
    for shard, number in fold.of:
        if shard != index or not any(fold.drifted(index, number)):
            continue
        phases = {phase for phase, _, _ in fold.counts.get(fold.of[shard, number], ())}
        out += [{"call": number, "phase": phase} for phase in sorted(phases) if (number, phase) not in sampled]
    return out


def _spread(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """SAMPLES_PER_CALL of them, in proportion to the invocations that each stands for, spread over the steps; those
    that hold the same (layers of one step) are one."""
    held: dict[bytes, dict[str, Any]] = {}
    for line in lines:
        key = orjson.dumps([line.get(part) for part in ("step", "scalars", "offsets", "tensors")])
        held[key] = {**line, "weight": line["weight"] + held.get(key, {"weight": 0.0})["weight"]}
    lines = sorted(held.values(), key=lambda line: (line.get("step", -1), line["call"]))
    if len(lines) <= SAMPLES_PER_CALL:
        return lines
    reached = list(itertools.accumulate(line["weight"] for line in lines))
    marks = [(i + 0.5) / SAMPLES_PER_CALL * reached[-1] for i in range(SAMPLES_PER_CALL)]
    return [lines[i] for i in sorted({bisect.bisect_left(reached, mark) for mark in marks})]


def _sample(line: dict[str, Any], number: int, phase: int, rank: int, values: dict[str, bytes]) -> Sample:
    return Sample(
        call=number,
        phase=PHASES[phase],
        rank=rank,
        step=line.get("step"),
        scalars={path: decode(value) for path, value in line["scalars"].items()},
        offsets=line["offsets"],
        tensors={path: _sampled_tensor(tensor, values) for path, tensor in line.get("tensors", {}).items()},
    )


def _sampled_tensor(tensor: dict[str, Any], values: dict[str, bytes]) -> SampledTensor:
    name = None
    if "values" in tensor:
        content = save({"value": np.array(tensor["values"], tensor["dtype"]).reshape(tensor["shape"])})
        name = hashlib.sha256(content).hexdigest() + ".safetensors"
        values[name] = content
    return SampledTensor(file=name, low=tensor.get("low"), high=tensor.get("high"))


def _totals(calls: list[Any]) -> dict[str, int]:
    kernels = [call for call in calls if call.kind == "kernel"]
    return {
        "calls": len(calls),
        "kernels": sum(call.total for call in kernels if call.work),
        "views": sum(call.total for call in kernels if not call.work),
        "regions": sum(call.total for call in calls if call.kind == "region"),
    }


def _taps(shards: list[Shard]) -> list[Tap]:
    taps = []
    for shard in shards:
        process = shard.process
        known: dict[str, Any] = {"rank": int(process.get("rank", 0)), "pid": int(process.get("pid", 0))}
        failures = shard.lines.get("tap", [])
        taps += [Tap(**{**known, **{k: line[k] for k in ("name", "status", "detail")}}) for line in failures]
        if shard.header(FAILED) and not failures:
            taps.append(Tap(name="dispatcher", status="failed", detail="it could write no more (disk full?)", **known))
        if process and not failures and not shard.header(FAILED):
            taps.append(Tap(name=process.get("recorder", "dispatcher"), **known))
    return taps


def _metadata(session: Session, shards: list[Shard], programs: _Programs) -> Metadata:
    recording = [shard for shard in shards if shard.process]
    first = recording[0].process if recording else {}
    lowest = min((batch.rank for batch in programs.batches), default=0)
    mine = [batch for batch in programs.batches if batch.rank == lowest]
    steps: Counter[str] = Counter()
    shapes: Counter[tuple[str, int, int]] = Counter()
    for batch in mine:
        steps[PHASES[batch.phase]] += batch.times
        shapes[PHASES[batch.phase], batch.tokens, batch.sequences] += batch.times
    for phase, name in enumerate(PHASES):
        steps[name] += sum(shard.header(LOOSE_STEPS + phase) for shard in recording[:1])
    dropped = {
        name: total
        for name, header in (
            ("overflow", OVERFLOW),
            ("samples", SAMPLES_SKIPPED),
            ("off_step", OFF_STEP),
            ("traced", TRACED),
        )
        if (total := sum(shard.header(header) for shard in recording))
    }
    return Metadata(
        kcap=__version__,
        model=session.model or first.get("model"),
        framework=session.framework,
        framework_version=first.get("framework_version"),
        engine_arguments=redact_arguments(session.engine_arguments),
        command=redact_command(session.command),
        layers_recorded=first.get("layers"),
        layers_model=session.layers_model or first.get("layers"),
        device=first.get("device"),
        driver=first.get("driver"),
        torch=first.get("torch"),
        python=first.get("python"),
        world_size=int(first.get("world_size", 1)),
        recorder=sorted({shard.process["recorder"] for shard in recording if "recorder" in shard.process}),
        complete=bool(recording) and all(map(_is_whole, shards)),
        taps=_taps(shards),
        steps={name: times for name, times in sorted(steps.items()) if times},
        batches=[
            {"phase": phase, "tokens": tokens, "sequences": sequences, "steps": times}
            for (phase, tokens, sequences), times in sorted(shapes.items())
        ],
        dropped=dropped,
        notes=_notes(recording),
    )


def _is_whole(shard: Shard) -> bool:
    if not shard.process:  # it had nothing to record, or could not
        return not shard.lines.get("tap")
    return bool(shard.header(CLOSED)) and not shard.header(FAILED) and not shard.lines.get("tap")


def _notes(shards: list[Shard]) -> list[str]:
    notes = []
    for shard in shards:
        reason = shard.process.get("recorder_reason")
        if reason:
            notes.append(f"not the native recorder: {reason}")
        if not shard.header(CLOSED):
            notes.append(f"process {shard.process.get('pid')} ended without closing: every step that had ended is here")
        if shard.torn:
            notes.append(f"process {shard.process.get('pid')}: {shard.torn} torn lines left out")
    return sorted(set(notes))


def discard(session: Session) -> None:
    """Remove a session's shards, once its Recording stands."""
    shutil.rmtree(session.directory, ignore_errors=True)

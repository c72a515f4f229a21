"""The Samples of all shards: which of them a Recording keeps, and the integer values they name."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections import Counter
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import save

from kcap.capture.fold.calls import Fold
from kcap.capture.shards.counts import STEPS
from kcap.schemas.recording.recording import PHASES, Sample, SampledTensor
from kcap.schemas.recording.values import decode

SAMPLES_PER_CALL = 4


def merge_samples(fold: Fold, ids: dict[bytes, int]) -> tuple[list[Sample], dict[str, bytes]]:
    """At most SAMPLES_PER_CALL Samples a Call, phase and rank, spread over the steps, and the values they name."""
    found: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for index, shard in enumerate(fold.shards):
        rank = int(shard.process.get("rank", 0))
        counted = [line for line in shard.lines.get("sample", []) if line.get("step", -1) < shard.header(STEPS)]
        latest = {(line["call"], line["phase"], line["slot"]): line for line in counted}
        sampled = {(line["call"], line["phase"]) for line in latest.values()}
        lines = [*latest.values(), *_scalar_lines(fold, index, sampled)]
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


def _scalar_lines(fold: Fold, index: int, sampled: set[tuple[int, int]]) -> list[dict[str, Any]]:
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

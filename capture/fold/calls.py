"""Folds calls that differ only in what drifts, and those that ranks and processes share, into one Call each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import orjson

from kcap.capture.shards.offsets import offsets_of, without_offsets
from kcap.capture.shards.reader import Shard
from kcap.schemas.recording.operators import does_work
from kcap.schemas.recording.recording import PHASES as PHASE_NAMES
from kcap.schemas.recording.recording import Call, Count, Mode

SCALARS = (bool, int, float)


class Fold:
    """Calls by their folded signature; `of[shard, id]` is the signature of a shard's own call."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self.shards = list(shards)
        self._drift = _drift_by_operator(self.shards)
        self.of: dict[tuple[int, int], bytes] = {}
        self.raw: dict[tuple[int, int], dict[str, Any]] = {}
        self.signatures: dict[bytes, dict[str, Any]] = {}
        self.counts: dict[bytes, Counter[tuple[int, int, Mode]]] = defaultdict(Counter)
        self.invocations: Counter[tuple[int, int, int]] = Counter()  # of a shard's own call, in a phase
        for index, shard in enumerate(self.shards):
            self._add_calls(index, shard)

    def _add_calls(self, index: int, shard: Shard) -> None:
        lines = {line["id"]: line for line in shard.lines.get("call", [])}
        for region in shard.lines.get("region", []):
            if region["of"] in lines:
                lines[region["id"]] = {**lines[region["of"]], "kind": "region", "id": region["id"]}
        for number, line in lines.items():
            self.raw[index, number] = line
            body = {name: value for name, value in line.items() if name not in ("id", "graph")}
            folded = {**body, "args": self._fold(line)}
            key = orjson.dumps(_without_fragment(folded), option=orjson.OPT_SORT_KEYS)
            self.of[index, number] = key
            self.signatures[key] = min(self.signatures.get(key, folded), folded, key=_fragment)

    def _fold(self, line: dict[str, Any]) -> list[dict[str, Any]]:
        scalars, offsets = self._drift.get(_called_as(line), (0, 0))
        args: list[dict[str, Any]] = line["args"]
        if not scalars and not offsets:
            return args
        return [_fold_argument(arg, scalars >> i & 1, offsets >> i & 1) for i, arg in enumerate(args)]

    def drifted(self, index: int, number: int) -> tuple[dict[str, Any], dict[str, int]]:
        """What a shard's own call still holds of the scalars and offsets that its fold leaves out."""
        body = self.raw[index, number]
        scalars, offsets = self._drift.get(_called_as(body), (0, 0))
        values: dict[str, Any] = {}
        places: dict[str, int] = {}
        for i, arg in enumerate(body["args"]):
            value = arg.get("value")
            if scalars >> i & 1 and _is_scalar(value):
                values[str(i)] = value
            if offsets >> i & 1:
                places |= {path: place for path, place in offsets_of(value, str(i)) if place is not None}
        return values, places

    def count(self, index: int, number: int, phase: int, times: int, mode: Mode = "eager") -> None:
        key = self.of.get((index, number))
        if key is not None and times:
            self.invocations[index, number, phase] += times
            self.counts[key][phase, int(self.shards[index].process.get("rank", 0)), mode] += times

    def count_loose(self) -> None:
        for index, number in self.of:
            for phase, times in enumerate(self.shards[index].loose_counts(number)):
                self.count(index, number, phase, times)

    def calls(self, order: list[bytes]) -> tuple[list[Call], dict[bytes, int]]:
        """The Calls in `order`, then the others that ran, and each signature's id."""
        seen = dict.fromkeys(order)
        keys = [*seen, *sorted(key for key in self.counts if key not in seen and self.counts[key])]
        ids = {key: number for number, key in enumerate(keys)}
        return [self._call(key, number) for key, number in ids.items()], ids

    def _call(self, key: bytes, number: int) -> Call:
        counts = [
            Count(phase=PHASE_NAMES[phase], rank=rank, mode=mode, count=times)
            for (phase, rank, mode), times in sorted(self.counts.get(key, {}).items())
        ]
        call = Call.model_validate({**self.signatures[key], "id": number, "counts": counts})
        return call if does_work(call) == call.work else call.model_copy(update={"work": does_work(call)})


def _fragment(line: dict[str, Any]) -> tuple[bool, str]:
    """Orders lines of one Call: it keeps one fragment of those that inductor wrote for its kernel in several places."""
    name = (line.get("launch") or {}).get("fragment")
    return name is None, str(name)


def _without_fragment(line: dict[str, Any]) -> dict[str, Any]:
    launch = line.get("launch")
    if not launch or "fragment" not in launch:
        return line
    return {**line, "launch": {name: value for name, value in launch.items() if name != "fragment"}}


CalledAs = tuple[str, bool]  # an operator, called eagerly or while a graph is captured


def _called_as(line: dict[str, Any]) -> CalledAs:
    return line["operator"], bool(line.get("graph"))


def _drift_by_operator(shards: list[Shard]) -> dict[CalledAs, tuple[int, int]]:
    found: dict[CalledAs, tuple[int, int]] = {}
    for shard in shards:
        for line in shard.lines.get("drift", []):
            scalars, offsets = found.get(_called_as(line), (0, 0))
            found[_called_as(line)] = (scalars | line["scalars"], offsets | line["offsets"])
    return found


def _is_scalar(value: Any) -> bool:
    if isinstance(value, SCALARS):
        return True
    if isinstance(value, list):
        return all(isinstance(item, SCALARS) for item in value)
    return isinstance(value, dict) and ("float" in value or "complex" in value)


def _fold_argument(arg: dict[str, Any], scalar: int, offset: int) -> dict[str, Any]:
    value = arg.get("value")
    if scalar and (_is_scalar(value) or (isinstance(value, dict) and "drift" in value)):
        return {**{key: item for key, item in arg.items() if key != "default"}, "value": {"drift": "number"}}
    return {**arg, "value": without_offsets(value)} if offset else arg

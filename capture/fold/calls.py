"""Folds calls that differ only in what drifts, and those that ranks and processes share, into one Call each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import orjson

from kcap.capture.shards.counts import LAYER_NAMES
from kcap.capture.shards.lines import CallLine, DriftLine, RegionLine, ShapesLine
from kcap.capture.shards.reader import Shard
from kcap.schemas.recording.operators import does_work
from kcap.schemas.recording.recording import PHASES as PHASE_NAMES
from kcap.schemas.recording.recording import Argument, Call, Count, Mode
from kcap.schemas.recording.values import Drift, TensorSpec, Value, encode, tensors

NUMBERS = (bool, int, float)


class Fold:
    """Calls by their folded signature; `of[shard, id]` is the signature of a shard's own call."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self.shards = list(shards)
        self._drift = _drift_by_operator(self.shards)
        self.of: dict[tuple[int, int], bytes] = {}
        self.lines: dict[tuple[int, int], CallLine] = {}
        self.signatures: dict[bytes, CallLine] = {}
        self.counts: dict[bytes, Counter[tuple[int, int, Mode]]] = defaultdict(Counter)
        self.invocations: Counter[tuple[int, int, int]] = Counter()  # of a shard's own call, in a phase
        self.shapes: Counter[bytes] = Counter()  # of a rounded call, how many it stands for
        self._wrappers = {name for shard in self.shards for name in _opened_wrappers(shard)}
        for index, shard in enumerate(self.shards):
            self._add_calls(index, shard)

    def _add_calls(self, index: int, shard: Shard) -> None:
        lines = {line.id: line for line in shard.lines(CallLine)}
        for region in shard.lines(RegionLine):
            if region.of in lines:
                lines[region.id] = lines[region.of].model_copy(update={"kind": "region", "id": region.id})
        shapes = {line.call: line.shapes for line in shard.lines(ShapesLine)}
        own: Counter[bytes] = Counter()
        for number, line in lines.items():
            if line.operator in self._wrappers:
                line = line.model_copy(update={"kind": "region"})
            self.lines[index, number] = line
            folded = self._fold(line)
            key = _signature(folded)
            self.of[index, number] = key
            if number in shapes:
                own[key] += shapes[number]
            self.signatures[key] = min(self.signatures.get(key, folded), folded, key=_fragment_order)
        self.shapes |= own

    def _fold(self, line: CallLine) -> CallLine:
        scalars, offsets = self._drift.get(_called_as(line), (0, 0))
        if not scalars and not offsets:
            return line
        args = [_fold_argument(arg, scalars >> i & 1, offsets >> i & 1) for i, arg in enumerate(line.args)]
        return line.model_copy(update={"args": args})

    def drifted(self, index: int, number: int) -> tuple[dict[str, Value], dict[str, int]]:
        """What a shard's own call still holds of the scalars and offsets that its fold leaves out."""
        line = self.lines[index, number]
        scalars, offsets = self._drift.get(_called_as(line), (0, 0))
        values: dict[str, Value] = {}
        offset_by_path: dict[str, int] = {}
        for i, arg in enumerate(line.args):
            if scalars >> i & 1 and _is_scalar(arg.value):
                values[str(i)] = arg.value
            if offsets >> i & 1:
                specs = tensors(arg.value, str(i))
                offset_by_path |= {path: spec.offset for path, spec in specs if spec.offset is not None}
        return values, offset_by_path

    def count(self, index: int, number: int, phase: int, times: int, mode: Mode = "eager") -> None:
        key = self.of.get((index, number))
        if key is not None and times:
            self.invocations[index, number, phase] += times
            self.counts[key][phase, self.shards[index].rank, mode] += times

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
        line = self.signatures[key]
        call = Call(
            id=number, operator=line.operator, kind=line.kind, parent=line.parent, work=line.work, args=line.args,
            launch=line.launch, counts=counts, shapes=max(self.shapes[key], 1),
        )  # fmt: skip
        return call if does_work(call) == call.work else call.model_copy(update={"work": does_work(call)})


MOST_NOTES = 8  # of operators whose calls are counted together


def rounded_notes(calls: Iterable[Call], closed: bool = True) -> list[str]:
    """Which operators ran more signatures than are kept apart; the first of them, where they are many.

    `closed`: by each process; one that was killed had told the last power of two of its further signatures.
    """
    least = "" if closed else "at least "
    rounded: dict[str, list[int]] = defaultdict(list)
    for call in calls:
        if call.shapes > 1:
            rounded[call.operator].append(call.shapes)
    notes = [
        f"{operator}: beside the calls kept apart, {least}{sum(shapes):,} more are counted in {len(shapes):,}, by the"
        " powers of two that their sizes lie between; each has the arguments of the first"
        for operator, shapes in rounded.items()
    ]
    left = len(notes) - MOST_NOTES
    return (
        notes
        if left <= 0
        else [*notes[:MOST_NOTES], f"{left} further operators have calls beyond those kept apart, too"]
    )


def _opened_wrappers(shard: Shard) -> set[str]:
    """Operators that are given their layer's name and were a region once: no call of theirs is a kernel."""
    lines = {line.id: line for line in shard.lines(CallLine)}
    regions = [lines[region.of] for region in shard.lines(RegionLine) if region.of in lines]
    return {line.operator for line in regions if any(arg.name in LAYER_NAMES for arg in line.args)}


def _signature(line: CallLine) -> bytes:
    """Equal for the lines of one Call: all of them but their numbers, fragments, and whether a graph was captured."""
    members = {name: getattr(line, name) for name in line.model_fields_set - {"t", "id", "graph", "launch"}}
    if "launch" in line.model_fields_set:
        members["launch"] = line.launch and line.launch.model_dump(exclude_unset=True, exclude={"fragment"})
    members["args"] = [
        {**{name: getattr(arg, name) for name in arg.model_fields_set}, "value": encode(arg.value)} for arg in line.args
    ]
    return orjson.dumps(members, option=orjson.OPT_SORT_KEYS)


def _fragment_order(line: CallLine) -> tuple[bool, str]:
    """Orders lines of one Call: it keeps one fragment of those that inductor wrote for its kernel in several places."""
    name = line.launch.fragment if line.launch else None
    return name is None, str(name)


CalledAs = tuple[str, bool]  # an operator, called eagerly or while a graph is captured


def _called_as(line: CallLine | DriftLine) -> CalledAs:
    return line.operator, line.graph


def _drift_by_operator(shards: list[Shard]) -> dict[CalledAs, tuple[int, int]]:
    drift: dict[CalledAs, tuple[int, int]] = {}
    for shard in shards:
        for line in shard.lines(DriftLine):
            scalars, offsets = drift.get(_called_as(line), (0, 0))
            drift[_called_as(line)] = (scalars | line.scalars, offsets | line.offsets)
    return drift


def _is_scalar(value: Value) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, NUMBERS) for item in value)
    return isinstance(value, (*NUMBERS, complex))


def _fold_argument(arg: Argument, scalar: int, offset: int) -> Argument:
    if scalar and (_is_scalar(arg.value) or isinstance(arg.value, Drift)):
        members: dict[str, Any] = {name: getattr(arg, name) for name in arg.model_fields_set - {"default"}}
        return Argument(**{**members, "value": Drift("number")})
    return arg.model_copy(update={"value": _without_offsets(arg.value)}) if offset else arg


def _without_offsets(value: Value) -> Value:
    if isinstance(value, list):
        return [_without_offsets(item) for item in value]
    return replace(value, offset=None) if isinstance(value, TensorSpec) else value

"""How two engines run a model: their kernels by purpose, side by side, in the mean step of each phase."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kcap.schemas.derive.derive import FamilyMatches, match_families
from kcap.schemas.derive.generic.family import family_of_work
from kcap.schemas.recording.operators import base_of
from kcap.schemas.recording.phases import PHASES
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Call, Metadata
from kcap.schemas.recording.signature import signature

DIGITS = 6  # of a count in a step
KernelKey: TypeAlias = tuple[str, str]  # purpose (of no family: empty) and name


@dataclass
class KernelShare:
    """In one step and on one rank: invocations by operator and by arguments, and microseconds where they are known."""

    operators: dict[str, float] = field(default_factory=dict)
    arguments: dict[str, float] = field(default_factory=dict)
    us: float | None = None

    def add(self, call: Call, count: float) -> None:
        tables = {call.operator: self.operators, signature(call.args): self.arguments}
        for name, counts in tables.items():
            counts[name] = counts.get(name, 0.0) + count

    @property
    def count(self) -> float:
        return sum(self.operators.values())

    def as_json(self) -> dict[str, Any]:
        tables = {"operators": rounded(self.operators), "arguments": rounded(self.arguments)}
        return {"per_step": round(self.count, DIGITS), "us_per_step": self.us, **tables}


def rounded(counts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(count, DIGITS) for name, count in counts.items()}


@dataclass(frozen=True)
class PurposeRow:
    """A Definition of a family, or an operator of none, as both run it."""

    purpose: str
    name: str
    a: KernelShare | None
    b: KernelShare | None

    @property
    def same(self) -> bool:
        return self.a is not None and self.b is not None and abs(self.a.count - self.b.count) < 1e-9

    def as_json(self) -> dict[str, Any]:
        sides = {"a": self.a.as_json() if self.a else None, "b": self.b.as_json() if self.b else None}
        return {"purpose": self.purpose or None, "name": self.name, **sides}


@dataclass(frozen=True)
class EnginePhase:
    """One Recording in one phase. `batches`: steps by (sequences, tokens); `lines`: what a step runs.

    `within`: microseconds in a step of regions that several lines share, by purpose; `untimed`: invocations in a step
    that have no time; None where nothing was measured.
    """

    steps: int
    batches: Mapping[tuple[int, int], int]
    lines: Mapping[KernelKey, KernelShare]
    within: Mapping[str, float]
    untimed: float | None

    @property
    def count(self) -> float:
        return sum(ran.count for ran in self.lines.values())

    @property
    def us(self) -> float | None:
        if self.untimed is None:
            return None
        return sum(ran.us or 0.0 for ran in self.lines.values()) + sum(self.within.values())

    def as_json(self) -> dict[str, Any]:
        batches = [{"sequences": s, "tokens": t, "steps": n} for (s, t), n in sorted(self.batches.items())]
        untimed = None if self.untimed is None else round(self.untimed, DIGITS)
        totals = {"per_step": round(self.count, DIGITS), "us_per_step": self.us, "untimed_per_step": untimed}
        return {"steps": self.steps, "batches": batches, **totals, "us_within": dict(self.within)}


@dataclass(frozen=True)
class PhaseDiff:
    """A phase that both have. Counts of a step compare; shapes and times do only where the batches are the same."""

    phase: str
    a: EnginePhase
    b: EnginePhase

    @property
    def lines(self) -> list[PurposeRow]:
        """The most called first, within a purpose, too."""
        keys = dict.fromkeys([*self.a.lines, *self.b.lines])
        rows = [PurposeRow(*key, self.a.lines.get(key), self.b.lines.get(key)) for key in keys]
        return sorted(rows, key=lambda row: (-_largest_count(row), row.name))

    @property
    def same_batches(self) -> bool:
        return _shares(self.a) == _shares(self.b)

    def as_json(self) -> dict[str, Any]:
        head = {"phase": self.phase, "same_batches": self.same_batches}
        sides = {"a": self.a.as_json(), "b": self.b.as_json()}
        return {**head, **sides, "lines": [line.as_json() for line in self.lines]}


def _largest_count(line: PurposeRow) -> float:
    return max(ran.count for ran in (line.a, line.b) if ran)


def _shares(side: EnginePhase) -> dict[tuple[int, int], float]:
    return {batch: steps / side.steps for batch, steps in side.batches.items()}


@dataclass(frozen=True)
class FamilyDiff:
    """`phases`: those that both ran, decode first; `alone`: steps of a phase that one has not: in A and in B."""

    phases: list[PhaseDiff]
    alone: dict[str, tuple[int, int]]
    warnings: list[str]

    @property
    def equal(self) -> bool:
        return not self.alone and all(line.same for phase in self.phases for line in phase.lines)

    def as_json(self) -> dict[str, Any]:
        alone = {phase: {"a": a, "b": b} for phase, (a, b) in self.alone.items()}
        head = {"equal": self.equal, "warnings": self.warnings, "phases_of_one": alone}
        return {**head, "phases": [phase.as_json() for phase in self.phases]}


def purposes(lines: Iterable[PurposeRow]) -> dict[str, list[PurposeRow]]:
    """Lines of one purpose together, the most called first; then those of no family, each under its own name."""
    by_purpose: dict[str, list[PurposeRow]] = defaultdict(list)
    for line in lines:
        by_purpose[line.purpose or line.name].append(line)
    order = sorted(by_purpose, key=lambda name: (not by_purpose[name][0].purpose, -_total_count(by_purpose[name])))
    return {name: by_purpose[name] for name in order}


def _total_count(lines: list[PurposeRow]) -> float:
    return max(sum(line.a.count for line in lines if line.a), sum(line.b.count for line in lines if line.b))


DECODE_FIRST = sorted(PHASES, key=lambda phase: phase != "decode")

# By op_type; any other op_type is its own purpose.
ATTENTION = (
    *("gqa_paged", "gqa_ragged", "mla_paged", "mla_ragged"),
    *("attention_masked", "attention_extend", "attention_split", "attention_split_merge", "attention_merge"),
)
PURPOSES = dict.fromkeys(ATTENTION, "attention") | {"rope_store": "rope"}

# Launches of SGLang and vLLM that are attention, or a part of one, where their family declines them.
STAGES = (
    "_fwd_kernel",
    "_fwd_kernel_unified",
    "_fwd_kernel_stage1",
    "_fwd_grouped_kernel_stage1",
    "_fwd_kernel_stage2",
)

# TensorRT-LLM's attention, which is given its cache by addresses: no family can tell what it reads.
BY_ADDRESS = ("attention", "attention_inplace")

PARTS = dict.fromkeys(
    (*(f"triton::{stage}" for stage in STAGES), *(f"trtllm::{name}" for name in BY_ADDRESS)), "attention"
)
TimeOf: TypeAlias = Callable[[Call, str], float | None]  # microseconds of one invocation in a phase


@dataclass(frozen=True)
class ComparedRecording:
    """What is compared: a Recording's Calls and metadata, and times where they were measured.

    `recording`: where the sources of its fused kernels are, by which they have families.
    """

    calls: list[Call]
    metadata: Metadata
    time: TimeOf | None = None
    recording: Recording | None = None


def compare_engines(a: ComparedRecording, b: ComparedRecording) -> FamilyDiff:
    first, second = _ComparedSide(a), _ComparedSide(b)
    steps = {phase: (a.metadata.steps.get(phase, 0), b.metadata.steps.get(phase, 0)) for phase in DECODE_FIRST}
    return FamilyDiff(
        phases=[PhaseDiff(phase, first.of(phase), second.of(phase)) for phase in DECODE_FIRST if all(steps[phase])],
        alone={phase: counts for phase, counts in steps.items() if any(counts) and not all(counts)},
        warnings=[*_warnings(a.metadata, b.metadata), *_uncompared(a, b)],
    )


def _uncompared(a: ComparedRecording, b: ComparedRecording) -> Iterator[str]:
    """What ran in no step, of phases that have none on either side."""
    for phase in DECODE_FIRST:
        if not a.metadata.steps.get(phase) and not b.metadata.steps.get(phase):
            outside = [sum(call.counted(phase) for call in side.calls if call.kind != "region") for side in (a, b)]
            if any(outside):
                yield f"{phase}: in no step, and not compared: {outside[0]:,} invocations in A, {outside[1]:,} in B"


def _warnings(a: Metadata, b: Metadata) -> Iterator[str]:
    unnamed = [letter for letter, side in (("A", a), ("B", b)) if not side.model]
    if len(unnamed) == 1:
        yield f"{unnamed[0]} does not name its model"
    elif a.model != b.model:
        yield f"two models: {a.model} in A, {b.model} in B"
    first, second = a.layers_recorded, b.layers_recorded
    if first and second and first != second:
        yield f"{first} layers in A, {second} in B: counts per step do not compare"
    elif first != second:
        yield f"layers: {first or 'not known'} in A, {second or 'not known'} in B: counts per step may not compare"
    if a.world_size != b.world_size:
        yield f"{a.world_size} ranks in A, {b.world_size} in B: counts are per step and rank"


class _ComparedSide:
    """One Recording's phases."""

    def __init__(self, recorded: ComparedRecording) -> None:
        self.recorded = recorded
        self.matches = match_families(recorded.calls, recorded.recording)
        self.keys_by_call = dict(_keys_by_call(self.matches, recorded.recording))
        self.by_id = {call.id: call for call in recorded.calls}
        self.regions: dict[str, set[KernelKey]] = defaultdict(set)
        for number, key in self.keys_by_call.items():
            self.regions[base_of(self.by_id[number].operator)].add(key)

    def of(self, phase: str) -> EnginePhase:
        metadata, time = self.recorded.metadata, self.recorded.time
        steps = metadata.steps[phase]
        share = 1 / (steps * max(metadata.world_size, 1))
        lines: dict[KernelKey, KernelShare] = defaultdict(KernelShare)
        within: dict[str, float] = defaultdict(float)
        untimed = 0.0
        for call, keys in self._called(phase):
            count = call.counted(phase) * share
            if call.id in self.keys_by_call:
                lines[self.keys_by_call[call.id]].add(call, count)
            if time is None or call.kind == "region":
                continue
            us = time(call, phase)
            if us is None:
                untimed += count
            else:
                _add_time(us * count, keys, lines, within)
        return EnginePhase(steps, _batches(metadata, phase), dict(lines), within, None if time is None else untimed)

    def _called(self, phase: str) -> Iterator[tuple[Call, set[KernelKey]]]:
        """Each Call of `phase` that counts, or lies in a region that does, with the lines that it may belong to."""
        for number, key in self.keys_by_call.items():
            if self.by_id[number].counted(phase):
                yield self.by_id[number], {key}
        for number, region in self.matches.covered.items():
            if self.by_id[number].counted(phase):
                yield self.by_id[number], self.regions[region]


def _add_time(
    us: float, keys: set[KernelKey], lines: Mapping[KernelKey, KernelShare], within: dict[str, float]
) -> None:
    """Add `us` to the line that it is of or, where several lines share a region, to their purpose."""
    if len(keys) == 1:
        (key,) = keys
        lines[key].us = (lines[key].us or 0.0) + us
    else:
        within[min(purpose for purpose, _ in keys)] += us


def _keys_by_call(matches: FamilyMatches, recording: Recording | None) -> Iterator[tuple[int, KernelKey]]:
    """The line of each Call that counts, by its id."""
    for kernel in matches.kernels:
        purpose = PURPOSES.get(kernel.definition.op_type, kernel.definition.op_type)
        yield from ((use.call.id, (purpose, kernel.definition.name)) for use in kernel.uses)
    for call in matches.rest:
        base = base_of(call.operator)
        yield call.id, (PARTS.get(base) or family_of_work(call, recording), base)


def _batches(metadata: Metadata, phase: str) -> Mapping[tuple[int, int], int]:
    steps: Counter[tuple[int, int]] = Counter()
    for batch in metadata.batches:
        if batch.get("phase") == phase:
            steps[batch.get("sequences", 0), batch.get("tokens", 0)] += batch.get("steps", 0)
    return steps

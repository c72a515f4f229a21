"""From two Recordings to what each runs in the mean step of a phase, by family: the comparison of two engines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kcap.schemas.diff_families import FamilyDiff, Key, PhaseDiff, Ran, Side
from kcap.schemas.families.derive import Known, by_family
from kcap.schemas.families.invocation import base_of
from kcap.schemas.records import Call, Metadata

PHASES = ("decode", "prefill", "mixed", "other")
# By op_type; any other is a purpose of its own.
PURPOSES = dict.fromkeys(("gqa_paged", "gqa_ragged", "mla_paged", "mla_ragged"), "attention") | {"rope_store": "rope"}
# Launches of SGLang and vLLM that are a part of a kernel, and so no family's.
STAGES = (
    "_fwd_kernel",
    "_fwd_kernel_unified",
    "_fwd_kernel_stage1",
    "_fwd_grouped_kernel_stage1",
    "_fwd_kernel_stage2",
)
PARTS = dict.fromkeys((f"triton::{stage}" for stage in STAGES), "attention")

Time: TypeAlias = Callable[[Call, str], float | None]  # microseconds of one invocation in a phase


@dataclass(frozen=True)
class Recorded:
    """What is compared: a Recording's Calls, what it says of itself, and times where they were measured."""

    calls: list[Call]
    metadata: Metadata
    time: Time | None = None


def diff_families(a: Recorded, b: Recorded) -> FamilyDiff:
    first, second = _Sides(a), _Sides(b)
    steps = {phase: (a.metadata.steps.get(phase, 0), b.metadata.steps.get(phase, 0)) for phase in PHASES}
    return FamilyDiff(
        phases=[PhaseDiff(phase, first.of(phase), second.of(phase)) for phase in PHASES if all(steps[phase])],
        alone={phase: both for phase, both in steps.items() if any(both) and not all(both)},
        warnings=list(_warnings(a.metadata, b.metadata)),
    )


def _warnings(a: Metadata, b: Metadata) -> Iterator[str]:
    if a.model != b.model:
        yield f"two models: {a.model} in A, {b.model} in B"
    if a.layers_recorded != b.layers_recorded:
        yield f"{a.layers_recorded} layers in A, {b.layers_recorded} in B: counts per step do not compare"
    if a.world_size != b.world_size:
        yield f"{a.world_size} ranks in A, {b.world_size} in B: counts are per step and rank"


class _Sides:
    """One Recording's phases."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.known = by_family(recorded.calls)
        self.places = dict(_places(self.known))
        self.by_id = {call.id: call for call in recorded.calls}
        self.regions: dict[str, set[Key]] = defaultdict(set)
        for number, key in self.places.items():
            self.regions[base_of(self.by_id[number].operator)].add(key)

    def of(self, phase: str) -> Side:
        metadata, time = self.recorded.metadata, self.recorded.time
        steps = metadata.steps[phase]
        share = 1 / (steps * max(metadata.world_size, 1))
        lines: dict[Key, Ran] = defaultdict(Ran)
        within: dict[str, float] = defaultdict(float)
        untimed = 0.0
        for call, keys in self._called(phase):
            count = call.counted(phase) * share
            if call.id in self.places:
                lines[self.places[call.id]].add(call, count)
            if time is None or call.kind == "region":
                continue
            us = time(call, phase)
            if us is None:
                untimed += count
            else:
                _spend(us * count, keys, lines, within)
        return Side(steps, _batches(metadata, phase), dict(lines), within, None if time is None else untimed)

    def _called(self, phase: str) -> Iterator[tuple[Call, set[Key]]]:
        """Each Call of `phase` that counts, or lies in a region that does, with the lines that it may belong to."""
        for number, key in self.places.items():
            if self.by_id[number].counted(phase):
                yield self.by_id[number], {key}
        for number, region in self.known.covered.items():
            if self.by_id[number].counted(phase):
                yield self.by_id[number], self.regions[region]


def _spend(us: float, keys: set[Key], lines: Mapping[Key, Ran], within: dict[str, float]) -> None:
    """Add `us` to the line that it is of or, where several lines share a region, to their purpose."""
    if len(keys) == 1:
        (key,) = keys
        lines[key].us = (lines[key].us or 0.0) + us
    else:
        within[min(purpose for purpose, _ in keys)] += us


def _places(known: Known) -> Iterator[tuple[int, Key]]:
    """The line of each Call that counts, by its id."""
    for kernel in known.kernels:
        purpose = PURPOSES.get(kernel.definition.op_type, kernel.definition.op_type)
        yield from ((use.call.id, (purpose, kernel.definition.name)) for use in kernel.uses)
    for call in known.rest:
        base = base_of(call.operator)
        yield call.id, (PARTS.get(base, ""), base)


def _batches(metadata: Metadata, phase: str) -> Mapping[tuple[int, int], int]:
    found: Counter[tuple[int, int]] = Counter()
    for batch in metadata.batches:
        if batch.get("phase") == phase:
            found[batch.get("sequences", 0), batch.get("tokens", 0)] += batch.get("steps", 0)
    return found

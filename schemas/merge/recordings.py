"""Several Recordings as one: of runs that did the same, whose counts add, or of the hosts of one run.

Calls join where their lines are the same but for id and counts (so that they have the same `call_key`), Programs where
they ran the same Calls; both are numbered by first appearance. Runs keep their ranks: rank 0 of two runs is one rank
that ran longer, and the steps of a run follow those of the run before. Hosts ran at the same time: their steps keep
their numbers, and ranks that two of them share are moved up by the ranks of the hosts before, each of which was a world
and a replica (`dp`) of its own. Hosts that recorded their ranks in the whole world share none: one rank of such a world
in two of them is refused. The steps of hosts are those of one run, but those of replicas add. Ranks that must agree are
compared anew. What differs and cannot be added is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kcap.schemas.merge.metadata import Part, check_settings, merge_metadata, parts_of
from kcap.schemas.recording.rank_agreement import disagreements
from kcap.schemas.recording.recording import Call, Metadata, Program, Recording, Request, Sample, Step
from kcap.schemas.recording.records import add_counts
from kcap.schemas.results.coverage import StepCoverage


@dataclass(frozen=True)
class Merged:
    """The content of the merged Recording, but for its files in values/ and kernels/: those of all."""

    metadata: Metadata
    calls: list[Call]
    programs: list[Program]
    steps: list[Step]
    requests: list[Request]
    samples: list[Sample]
    parts: list[Part]

    @cached_property
    def call_ids(self) -> dict[str, int]:
        return _numbers(part.call_keys for part in self.parts)

    @cached_property
    def program_ids(self) -> dict[str, int]:
        return _numbers(part.program_keys for part in self.parts)

    def moved(self, part: Part, step: StepCoverage) -> StepCoverage:
        """A profiled step of `part`, as it is here."""
        kernels = [kernel.model_copy(update={"call": self._call(part, kernel.call)}) for kernel in step.kernels]
        key = part.program_keys.get(step.program) if step.program is not None else None
        program = self.program_ids[key] if key is not None else None
        moved = {"index": step.index + part.steps, "rank": step.rank + part.ranks}
        return step.model_copy(update={**moved, "kernels": kernels, "program": program})

    def _call(self, part: Part, number: int | None) -> int | None:
        return None if number is None else self.call_ids[part.call_key(number, "coverage")]


def merge_recordings(recordings: Sequence[Recording], hosts: bool = False) -> Merged:
    """One Recording of several; CallError names the settings that they do not share."""
    check_settings(recordings)
    parts = parts_of(recordings, hosts)
    calls = _calls(parts)
    ids = _numbers(part.call_keys for part in parts)
    programs, numbers = _programs(parts, ids)
    requests, steps = _requests_and_steps(parts, numbers)
    metadata = merge_metadata(parts, calls, hosts)
    disagreeing = disagreements(metadata.ranks, calls, programs, steps)
    return Merged(
        metadata.model_copy(update={"disagreements": disagreeing}),
        calls,
        programs,
        steps,
        requests,
        [_sample(part, sample, ids) for part in parts for sample in part.recording.samples],
        parts,
    )


def _numbers(several: Iterable[Mapping[int, str]]) -> dict[str, int]:
    """Keys numbered by first appearance."""
    return {key: number for number, key in enumerate(dict.fromkeys(key for keys in several for key in keys.values()))}


def _calls(parts: Sequence[Part]) -> list[Call]:
    merged: dict[str, Call] = {}
    for part in parts:
        for call in part.recording.calls:
            key = part.call_keys[call.id]
            earlier = merged.get(key)
            counts = add_counts([*(earlier.counts if earlier else []), *part.moved(call.counts)])
            number, shapes = (earlier.id, earlier.shapes) if earlier else (len(merged), 1)
            merged[key] = call.model_copy(update={"id": number, "counts": counts, "shapes": max(call.shapes, shapes)})
    return list(merged.values())


def _programs(parts: Sequence[Part], ids: dict[str, int]) -> tuple[list[Program], dict[str, int]]:
    numbers = _numbers(part.program_keys for part in parts)
    merged: dict[str, Program] = {}
    for part in parts:
        for program in part.recording.programs:
            key = part.program_keys[program.id]
            earlier = merged.get(key)
            merged[key] = program.model_copy(
                update={
                    "id": numbers[key],
                    "calls": [ids[part.call_keys[number]] for number in program.calls],
                    "graphs": [(position, numbers[part.program_keys[number]]) for position, number in program.graphs],
                    "counts": add_counts([*(earlier.counts if earlier else []), *part.moved(program.counts)]),
                }
            )
    return list(merged.values()), numbers


def _requests_and_steps(parts: Sequence[Part], numbers: dict[str, int]) -> tuple[list[Request], list[Step]]:
    """The requests of one Recording follow those of the one before; its blocks are others, whatever their numbers."""
    requests: list[Request] = []
    steps: list[Step] = []
    blocks = 0
    for part in parts:
        own = part.recording.requests
        steps += [_step(part, step, numbers, len(requests)) for step in part.recording.steps]
        requests += [_request(part, request, blocks) for request in own]
        blocks += 1 + max((block for request in own for block in request.blocks), default=-1)
    return requests, steps


def _request(part: Part, request: Request, blocks: int) -> Request:
    """`blocks`: how many numbers come before those of `part`."""
    first = None if request.first is None else request.first + part.steps
    moved = {"rank": request.rank + part.ranks, "first": first, "blocks": [n + blocks for n in request.blocks]}
    return request.model_copy(update=moved)


def _step(part: Part, step: Step, numbers: dict[str, int], requests: int) -> Step:
    """`requests`: how many come before those of `part`."""
    key = part.program_keys.get(step.program) if step.program is not None else None
    moved = {"index": step.index + part.steps, "rank": step.rank + part.ranks}
    names = {"program": numbers[key] if key is not None else None, "requests": [r + requests for r in step.requests]}
    return step.model_copy(update={**moved, **names})


def _sample(part: Part, sample: Sample, ids: dict[str, int]) -> Sample:
    step = None if sample.step is None else sample.step + part.steps
    call = ids[part.call_key(sample.call, "samples")]
    return sample.model_copy(update={"call": call, "rank": sample.rank + part.ranks, "step": step})

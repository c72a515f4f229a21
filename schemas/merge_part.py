"""One of several Recordings that become one: what its Calls and Programs join by, and what its numbers move up by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import orjson

from kcap.errors import CallError, FormatError
from kcap.schemas.ranks import REPLICA, Rank
from kcap.schemas.recording import Call, Count, Program, Recording


@dataclass(frozen=True)
class Part:
    """A Recording; `ranks` and `steps` are added to its ranks and to the numbers of its steps, `replicas` to
    those of its replicas of data parallelism; None where they stay."""

    recording: Recording
    ranks: int = 0
    steps: int = 0
    replicas: int | None = None

    def told(self) -> Iterator[Rank]:
        """What it tells of its ranks, as they are here."""
        for rank in self.recording.metadata.ranks:
            moved = {} if self.replicas is None else {REPLICA: rank.places.get(REPLICA, 0) + self.replicas}
            groups = {name: [one + self.ranks for one in group] for name, group in rank.groups.items()}
            known = {"rank": rank.rank + self.ranks, "groups": groups}
            yield rank.model_copy(update={**known, "places": {**rank.places, **moved}})

    def moved(self, counts: Iterable[Count]) -> list[Count]:
        return [one.model_copy(update={"rank": one.rank + self.ranks}) for one in counts]

    @cached_property
    def call_keys(self) -> dict[int, str]:
        """A SHA-256 of each Call's line but for id, counts and what torch told of its kernel, by its id."""
        return {call.id: _digest(_identity(call).line()) for call in self.recording.calls}

    @cached_property
    def program_keys(self) -> dict[int, str]:
        """The same of each Program, its Calls and graphs by their keys; FormatError for one that names none of them."""
        programs = {program.id: program for program in self.recording.programs}
        plain = {number: self._digest(program, []) for number, program in programs.items()}
        return {number: self._digest(program, self._graphs(program, plain)) for number, program in programs.items()}

    def _digest(self, program: Program, graphs: list[tuple[int, str]]) -> str:
        rest = program.model_dump(mode="json", exclude={"id", "counts", "calls", "graphs"})
        return _digest(orjson.dumps([rest, [self.call_key(number, "programs") for number in program.calls], graphs]))

    def _graphs(self, program: Program, plain: dict[int, str]) -> list[tuple[int, str]]:
        if missing := [number for _, number in program.graphs if number not in plain]:
            raise self.damaged("programs", f"a Program {missing[0]}")
        return [(place, plain[number]) for place, number in program.graphs]

    def call_key(self, number: int, table: str) -> str:
        """The key of the Call that a line of `table` names."""
        if number not in self.call_keys:
            raise self.damaged(table, f"a Call {number}")
        return self.call_keys[number]

    def damaged(self, table: str, named: str) -> FormatError:
        return FormatError(str(self.recording.path / f"{table}.jsonl"), f"names {named} that is not there")


def _identity(call: Call) -> Call:
    launch = call.launch and call.launch.model_copy(update={"fragment": None})
    return call.model_copy(update={"id": 0, "counts": [], "launch": launch})


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def parts_of(recordings: Sequence[Recording], hosts: bool) -> list[Part]:
    """Runs follow one another, rank by rank; hosts ran together, and the ranks of each follow those before it unless
    no two of them have one in common. CallError where two hosts say that they recorded the same rank of one world."""
    if hosts and not _shared(recordings):
        return [Part(recording) for recording in recordings]
    if not hosts:
        _check_runs(recordings)
    parts, ranks, steps, replicas = [], 0, 0, 0
    for recording in recordings:
        parts.append(Part(recording, ranks, 0, replicas) if hosts else Part(recording, steps=steps))
        ranks += max(recording.metadata.world_size, max(_ranks(recording), default=0) + 1)
        replicas += max((rank.places.get(REPLICA, 0) + 1 for rank in recording.metadata.ranks), default=1)
        last = max((step.index + 1 for step in recording.steps), default=0)
        steps += max(last, sum(recording.metadata.steps.values()))
    return parts


def _check_runs(recordings: Sequence[Recording]) -> None:
    """CallError for parts of one world that have no rank in common: their steps are the same, and would be added."""
    first, *others = recordings
    for other in others:
        if _is_part(first) and _is_part(other) and not _ranks(first) & _ranks(other):
            raise CallError(
                f"{first.path} and {other.path} have different ranks of a world of {first.metadata.world_size}: "
                "pass --hosts to merge the hosts of one run"
            )


def _shared(recordings: Sequence[Recording]) -> bool:
    """Whether hosts have ranks in common: each then was a world of its own."""
    seen: dict[int, Recording] = {}
    shared = False
    for recording in recordings:
        for rank in sorted(_ranks(recording)):
            other = seen.setdefault(rank, recording)
            if other is recording:
                continue
            shared = True
            if part := next((one for one in (other, recording) if _is_part(one)), None):
                raise CallError(
                    f"{other.path} and {recording.path} both have rank {rank}, and {part.path} is a part of a world of "
                    f"{part.metadata.world_size} ranks: the hosts of one run share none (runs that follow one another "
                    "are merged without --hosts)"
                )
    return shared


def _is_part(recording: Recording) -> bool:
    """Whether it says that its world has ranks that it has not."""
    return 0 < len(recording.metadata.ranks) < recording.metadata.world_size


def _ranks(recording: Recording) -> set[int]:
    told = {rank.rank for rank in recording.metadata.ranks}
    return told | {count.rank for call in recording.calls for count in call.counts}

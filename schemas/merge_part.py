"""One of several Recordings that become one: what its Calls and Programs join by, and what its numbers move up by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import orjson

from kcap.errors import FormatError
from kcap.schemas.recording import Call, Count, Program, Recording


@dataclass(frozen=True)
class Part:
    """A Recording; `ranks` and `steps` are added to its ranks and to the numbers of its steps."""

    recording: Recording
    ranks: int = 0
    steps: int = 0

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
    no two of them have one in common."""
    spans = [_ranks(recording) for recording in recordings]
    shared = sum(map(len, spans)) > len(set().union(*spans))
    parts, ranks, steps = [], 0, 0
    for recording, span in zip(recordings, spans, strict=True):
        parts.append(Part(recording, ranks if hosts and shared else 0, 0 if hosts else steps))
        ranks += max(recording.metadata.world_size, max(span, default=0) + 1)
        last = max((step.index + 1 for step in recording.steps), default=0)
        steps += max(last, sum(recording.metadata.steps.values()))
    return parts


def _ranks(recording: Recording) -> set[int]:
    return {count.rank for call in recording.calls for count in call.counts}

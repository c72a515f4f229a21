"""The Recordings that become one: the keys by which Calls and Programs join, and the metadata of the result.

It says which settings must be equal, what is added up, how ranks are renumbered, and whether the seal still holds.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from kcap.errors import CallError, FormatError, KcapError
from kcap.schemas.recording.recording import Count, Program, Recording
from kcap.schemas.recording.records import FORMAT, REPLICA, Call, Metadata, Rank, Tap, totals
from kcap.schemas.recording.seal import holds, seal
from kcap.schemas.recording.turns import FILE as TURNS_FILE
from kcap.schemas.recording.values import without_mapped


@dataclass(frozen=True)
class Part:
    """A Recording; `ranks` and `steps` are added to its ranks and to the numbers of its steps, `replicas` to
    those of its replicas of data parallelism; None where they stay."""

    recording: Recording
    ranks: int = 0
    steps: int = 0
    replicas: int | None = None

    def moved_ranks(self) -> Iterator[Rank]:
        """What it says of its ranks, numbered as in the merged Recording."""
        for rank in self.recording.metadata.ranks:
            moved = {} if self.replicas is None else {REPLICA: rank.places.get(REPLICA, 0) + self.replicas}
            groups = {name: [number + self.ranks for number in group] for name, group in rank.groups.items()}
            renumbered = {"rank": rank.rank + self.ranks, "groups": groups}
            yield rank.model_copy(update={**renumbered, "places": {**rank.places, **moved}})

    def moved_taps(self) -> Iterator[Tap]:
        for tap in self.recording.metadata.taps:
            yield tap.model_copy(update={"rank": tap.rank + self.ranks})

    def moved(self, counts: Iterable[Count]) -> list[Count]:
        return [count.model_copy(update={"rank": count.rank + self.ranks}) for count in counts]

    @cached_property
    def call_keys(self) -> dict[int, str]:
        """A SHA-256 of each Call's line without id, counts and fragment, by its id."""
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

    def damaged(self, table: str, missing: str) -> FormatError:
        return FormatError(str(self.recording.path / f"{table}.jsonl"), f"names {missing} that is not there")


def _identity(call: Call) -> Call:
    launch = call.launch and call.launch.model_copy(update={"fragment": None})
    args = [argument.model_copy(update={"value": without_mapped(argument.value)}) for argument in call.args]
    return call.model_copy(update={"id": 0, "counts": [], "launch": launch, "args": args})


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def parts_of(recordings: Sequence[Recording], hosts: bool) -> list[Part]:
    """Runs follow one another, rank by rank; hosts ran together, and the ranks of each follow those before it unless
    no two of them have one in common. CallError where two hosts say that they recorded the same rank of one world."""
    if hosts and not _share_ranks(recordings):
        return [Part(recording) for recording in recordings]
    if not hosts:
        _check_runs(recordings)
    parts, ranks, steps, replicas = [], 0, 0, 0
    for recording in recordings:
        parts.append(Part(recording, ranks, 0, replicas) if hosts else Part(recording, steps=steps))
        ranks += max(recording.metadata.world_size, max(_reported_ranks(recording), default=0) + 1)
        replicas += max((rank.places.get(REPLICA, 0) + 1 for rank in recording.metadata.ranks), default=1)
        last = max((step.index + 1 for step in recording.steps), default=0)
        steps += max(last, sum(recording.metadata.steps.values()))
    return parts


def _check_runs(recordings: Sequence[Recording]) -> None:
    """CallError for parts of one world that have no rank in common: their steps are the same, and would be added."""
    first, *others = recordings
    for other in others:
        if _is_part(first) and _is_part(other) and not _reported_ranks(first) & _reported_ranks(other):
            raise CallError(
                f"{first.path} and {other.path} have different ranks of a world of {first.metadata.world_size}: "
                "pass --hosts to merge the hosts of one run"
            )


def _share_ranks(recordings: Sequence[Recording]) -> bool:
    """Whether hosts have ranks in common, so that each was a world of its own."""
    seen: dict[int, Recording] = {}
    shared = False
    for recording in recordings:
        for rank in sorted(_reported_ranks(recording)):
            other = seen.setdefault(rank, recording)
            if other is recording:
                continue
            shared = True
            if part := next(filter(_is_part, (other, recording)), None):
                raise CallError(
                    f"{other.path} and {recording.path} both have rank {rank}, and {part.path} is a part of a world of "
                    f"{part.metadata.world_size} ranks: the hosts of one run share none (runs that follow one another "
                    "are merged without --hosts)"
                )
    return shared


def _is_part(recording: Recording) -> bool:
    """Whether its world has ranks that were not recorded in it."""
    return 0 < len(recording.metadata.ranks) < recording.metadata.world_size


def _reported_ranks(recording: Recording) -> set[int]:
    reported = {rank.rank for rank in recording.metadata.ranks}
    return reported | {count.rank for call in recording.calls for count in call.counts}


SETTINGS = (
    "model",
    "framework",
    "framework_version",
    "engine_arguments",
    "layers_recorded",
    "layers_model",
    "device",
    "recorder",
    "plan",
)

UNSEALED = "not all kernel sources were sealed by this user: look at them in kernels/, then pass --trust to replay"


def check_settings(recordings: Sequence[Recording]) -> None:
    first, *others = recordings
    for other in others:
        if names := [name for name in SETTINGS if getattr(first.metadata, name) != getattr(other.metadata, name)]:
            raise CallError(
                f"{first.path} and {other.path} differ in {', '.join(names)}: only runs of the same are merged "
                f"(kcap diff {first.path} {other.path} compares them)"
            )


def merge_metadata(parts: Sequence[Part], calls: list[Call], hosts: bool) -> Metadata:
    """recording.json of all `parts`; what differs between them and cannot be added is left out."""
    several = [part.recording.metadata for part in parts]
    equal = ("kcap", "command", "client", "driver", "torch", "python")
    same = {
        name: getattr(several[0], name)
        for name in equal
        if all(getattr(metadata, name) == getattr(several[0], name) for metadata in several)
    }
    settings = {name: getattr(several[0], name) for name in SETTINGS}
    sealed, notes = _seal(parts)
    together = hosts and not _have_own_replicas(parts)
    block_sizes = {metadata.block_size for metadata in several if metadata.block_size}
    return Metadata(
        format="{}.{}".format(*FORMAT),
        **settings,
        **same,
        kernel_ids="definition",  # the calling record is derived anew
        world_size=max(part.ranks + part.recording.metadata.world_size for part in parts),
        ranks=_ranks(parts),
        seal=sealed,
        coverage=None if len(several) > 1 else several[0].coverage,
        complete=all(metadata.complete for metadata in several),
        taps=list(dict.fromkeys(tap for part in parts for tap in part.moved_taps())),
        steps=_summed([metadata.steps for metadata in several], together),
        batches=_batches(several, together),
        totals=totals(calls),
        block_size=block_sizes.pop() if len(block_sizes) == 1 else None,
        dropped=_summed([metadata.dropped for metadata in several], False),
        notes=list(dict.fromkeys([note for metadata in several for note in metadata.notes] + notes + _left_out(parts))),
    )


def _left_out(parts: Sequence[Part]) -> list[str]:
    """What each of several runs has for itself."""
    turns = any((part.recording.path / TURNS_FILE).is_file() for part in parts)
    windows = any(len(part.recording.metadata.windows) > 1 for part in parts)
    left = " and ".join(name for name, there in (("turns", turns), ("windows", windows)) if there)
    return [f"the {left} of what was merged are in those Recordings alone"] if left else []


def _ranks(parts: Sequence[Part]) -> list[Rank]:
    """In order; the same rank of several runs is one that ran longer."""
    rank_by_number: dict[int, Rank] = {}
    for part in parts:
        for rank in part.moved_ranks():
            merged = rank_by_number.get(rank.rank, rank)
            steps = {} if merged is rank else {"steps": _summed([merged.steps, rank.steps], False)}
            rank_by_number[rank.rank] = merged.model_copy(update={"ended": merged.ended and rank.ended, **steps})
    return [rank_by_number[number] for number in sorted(rank_by_number)]


def _have_own_replicas(parts: Sequence[Part]) -> bool:
    """Whether hosts are known to have run replicas of their own: the steps of one are none of another's."""
    replicas = [{rank.places.get(REPLICA, 0) for rank in part.moved_ranks()} for part in parts]
    return all(replicas) and sum(map(len, replicas)) == len(set().union(*replicas))


def _summed(several: Iterable[dict[str, int]], together: bool) -> dict[str, int]:
    """Sums by name; of hosts that all count the steps of one run, the most."""
    total: Counter[str] = Counter()
    for counts in several:
        total = total | Counter(counts) if together else total + Counter(counts)
    return dict(total)


def _batches(several: Iterable[Metadata], together: bool) -> list[dict[str, Any]]:
    kinds = [{_kind(batch): _steps(batch) for batch in metadata.batches} for metadata in several]
    return [{**orjson.loads(kind), "steps": steps} for kind, steps in _summed(kinds, together).items()]


def _steps(batch: dict[str, Any]) -> int:
    steps = batch.get("steps")
    if not isinstance(steps, int):
        raise FormatError("recording.json", f"batches: a batch has a number of steps, not {steps!r}")
    return steps


def _kind(batch: dict[str, Any]) -> str:
    return orjson.dumps({name: value for name, value in batch.items() if name != "steps"}).decode()


def _seal(parts: Sequence[Part]) -> tuple[str | None, list[str]]:
    """This user's seal of all kernel sources, if it was on each of the Recordings that has any."""
    kernels = {part.recording.path: files_in(part.recording.path / "kernels") for part in parts}
    if not any(kernels.values()):
        return None, []
    own = [holds(p.recording.metadata.seal, kernels[p.recording.path]) for p in parts if kernels[p.recording.path]]
    try:
        return (seal(set().union(*kernels.values())), []) if all(own) else (None, [UNSEALED])
    except (OSError, KcapError):
        return None, [UNSEALED]


def files_in(folder: Path) -> set[str]:
    """The files in a Recording's folder."""
    return {path.name for path in folder.iterdir() if path.is_file()} if folder.is_dir() else set()

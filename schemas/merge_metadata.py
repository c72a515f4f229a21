"""recording.json of several Recordings that become one: what must be the same, what is added, and whose seal it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from kcap.errors import CallError, FormatError, KcapError
from kcap.schemas.merge_part import Part
from kcap.schemas.ranks import REPLICA, Rank
from kcap.schemas.recording import Recording
from kcap.schemas.records import FORMAT, Call, Metadata, Tap, totals
from kcap.schemas.seal import holds, seal

SETTINGS = (
    "model",
    "framework",
    "framework_version",
    "engine_arguments",
    "layers_recorded",
    "layers_model",
    "device",
    "recorder",
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
    same = {name: getattr(several[0], name) for name in equal if all(_same(one, several[0], name) for one in several)}
    settings = {name: getattr(several[0], name) for name in SETTINGS}
    sealed, notes = _seal(parts)
    together = hosts and not _apart(parts)
    return Metadata(
        format="{}.{}".format(*FORMAT),
        **settings,
        **same,
        kernel_ids="definition",  # the calling record is derived anew
        world_size=_world(parts),
        ranks=_ranks(parts),
        seal=sealed,
        coverage=None if len(several) > 1 else several[0].coverage,
        complete=all(one.complete for one in several),
        taps=list(dict.fromkeys(_tap(part, tap) for part in parts for tap in part.recording.metadata.taps)),
        steps=_summed([one.steps for one in several], together),
        batches=_batches(several, together),
        totals=totals(calls),
        dropped=_summed([one.dropped for one in several], False),
        notes=list(dict.fromkeys([note for one in several for note in one.notes] + notes)),
    )


def _same(one: Metadata, other: Metadata, name: str) -> bool:
    return bool(getattr(one, name) == getattr(other, name))


def _world(parts: Sequence[Part]) -> int:
    return max(part.ranks + part.recording.metadata.world_size for part in parts)


def _ranks(parts: Sequence[Part]) -> list[Rank]:
    """In order; the same rank of several runs is one that ran longer."""
    found: dict[int, Rank] = {}
    for part in parts:
        for rank in part.told():
            known = found.get(rank.rank, rank)
            steps = {} if known is rank else {"steps": _summed([known.steps, rank.steps], False)}
            found[rank.rank] = known.model_copy(update={"ended": known.ended and rank.ended, **steps})
    return [found[number] for number in sorted(found)]


def _apart(parts: Sequence[Part]) -> bool:
    """Whether hosts are known to have run replicas of their own: the steps of one are none of another's."""
    replicas = [{rank.places.get(REPLICA, 0) for rank in part.told()} for part in parts]
    return all(replicas) and sum(map(len, replicas)) == len(set().union(*replicas))


def _tap(part: Part, tap: Tap) -> Tap:
    return tap.model_copy(update={"rank": tap.rank + part.ranks})


def _summed(several: Iterable[dict[str, int]], together: bool) -> dict[str, int]:
    """Sums by name; of hosts that all count the steps of one run, the most."""
    total: Counter[str] = Counter()
    for one in several:
        total = total | Counter(one) if together else total + Counter(one)
    return dict(total)


def _batches(several: Iterable[Metadata], together: bool) -> list[dict[str, Any]]:
    kinds = [{_kind(batch): _steps(batch) for batch in one.batches} for one in several]
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

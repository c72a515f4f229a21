"""What `kcap show` says of ranks: where each stands, its steps, and which are not here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from kcap.schemas.ranks import Rank
from kcap.schemas.records import PHASES, Metadata

COLUMNS = ("stands at", "steps")


def cells(metadata: Metadata, name: str) -> Iterator[Text]:
    """The COLUMNS of the row `rank N`; empty where the Recording does not tell (before format 1.4)."""
    rank = next((rank for rank in metadata.ranks if name == f"rank {rank.rank}"), None)
    yield Text("" if rank is None else _place(rank, metadata.ranks))
    yield Text("") if rank is None else _steps(rank)


def _place(rank: Rank, ranks: Sequence[Rank]) -> str:
    return ", ".join(f"{kind} {place} of {_size(kind, rank, ranks)}" for kind, place in sorted(rank.places.items()))


def _size(kind: str, rank: Rank, ranks: Sequence[Rank]) -> int:
    """Of the rank's group; replicas that form none are as many as are here."""
    return len(rank.groups.get(kind, ())) or max(other.places.get(kind, 0) for other in ranks) + 1


def _steps(rank: Rank) -> Text:
    told = ", ".join(f"{rank.steps[phase]:,} {phase}" for phase in PHASES if rank.steps.get(phase)) or "none"
    return Text(told) if rank.ended else Text(f"{told}, then killed", "bold yellow")


def world(metadata: Metadata) -> str:
    """`4 ranks`, or `ranks 0–3 of 8` where the others were recorded elsewhere, if at all."""
    here = [rank.rank for rank in metadata.ranks]
    if here and len(here) < metadata.world_size:
        return f"{'rank' if len(here) == 1 else 'ranks'} {_spans(here)} of {metadata.world_size}"
    return f"{metadata.world_size} ranks"


def _spans(numbers: Sequence[int]) -> str:
    """`0–3, 6`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans)

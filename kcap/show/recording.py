"""How `kcap show` looks: a Recording's header, then its rows as a table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kcap.schemas.recording.phases import PHASES, Phase
from kcap.schemas.recording.records import Metadata, Rank
from kcap.show.summary import Row, Summary

PIPED_WIDTH = 200


MOST_SIZES = 6


PARTIAL = "PARTIAL: not all that ran is here: a process ended early, or a tap could not see it (see below)"


def console() -> Console:
    """Standard output; as wide as the terminal, or wide enough to keep a row on a line where there is none."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=PIPED_WIDTH)


def header(metadata: Metadata) -> Iterator[Text]:
    """Who ran what, where, how much of it, and what went wrong while recording."""
    yield Text(identity(metadata), style="bold")
    yield Text(" · ".join(_circumstances(metadata)), style="dim")
    if metadata.steps:
        yield Text("steps: " + ", ".join(f"{metadata.steps[p]:,} {p}" for p in PHASES if metadata.steps.get(p)))
    if len(metadata.windows) > 1:
        yield Text("windows: " + ", ".join(f"{window.get('steps', 0):,}" for window in metadata.windows) + " steps")
    if graphs := _graphs(metadata):
        yield Text(f"CUDA graphs: {graphs}")
    share = (metadata.coverage or {}).get("share")
    if share is not None:
        yield Text(f"coverage: {share:.1%} of the GPU time of the profiled steps is of these calls")
    yield from _warnings(metadata)


def _graphs(metadata: Metadata) -> str:
    """How many steps replayed graphs, and of which padded sizes."""
    steps: Counter[str] = Counter()
    sizes: dict[str, set[int]] = defaultdict(set)
    for batch in metadata.batches:
        mode = batch.get("mode", "eager")
        if mode != "eager":
            steps[mode] += batch["steps"]
            sizes[mode].add(batch.get("padded") or batch["tokens"])
    return "; ".join(
        f"{times:,} steps {mode}, padded to {', '.join(map(str, sorted(sizes[mode])[:MOST_SIZES]))}"
        for mode, times in steps.items()
    )


def identity(metadata: Metadata) -> str:
    """Model, engine, device, layers and ranks on one line."""
    return " · ".join(_identity(metadata))


def _identity(metadata: Metadata) -> Iterator[str]:
    yield metadata.model or "a PyTorch program"
    if metadata.framework:
        yield f"{metadata.framework} {metadata.framework_version or ''}".strip()
    yield metadata.device or "unknown device"
    if metadata.layers_recorded:
        yield f"{metadata.layers_recorded} of {metadata.layers_model or '?'} layers"
    if metadata.world_size > 1:
        yield describe_world(metadata)


def _circumstances(metadata: Metadata) -> Iterator[str]:
    yield f"kcap {metadata.kcap or '?'}"
    if metadata.recorder:
        yield f"recorder {', '.join(metadata.recorder)}"
    if metadata.torch:
        yield f"torch {metadata.torch}"
    if metadata.driver:
        yield f"driver {metadata.driver}"
    if metadata.complete:
        yield "complete"


def _warnings(metadata: Metadata) -> Iterator[Text]:
    if not metadata.complete:
        yield Text(PARTIAL, "bold yellow")
    for tap in metadata.taps:
        if tap.status == "failed":
            yield Text(f"TAP FAILED: {tap.name} (rank {tap.rank}, process {tap.pid}): {tap.detail}", "bold red")
    for found in metadata.disagreements:
        yield Text(f"RANKS DIFFER: {found.text}", "bold yellow")
    for reason, count in metadata.dropped.items():
        yield Text(f"dropped: {reason}: {count:,}", "yellow")
    for note in metadata.notes:
        yield Text(f"note: {note}", "dim")


def table(summary: Summary) -> Table:
    """The rows, with a column for each phase that occurs."""
    columns = _Columns(summary)
    out = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    out.add_column(summary.by, overflow="fold")
    for name in columns.told:
        out.add_column(name, overflow="fold")
    out.add_column(columns.second, overflow="fold", justify="left" if summary.by == "kernel" else "right")
    for name in columns.numbers:
        out.add_column(name, justify="right", no_wrap=True)
    for row in summary.rows:
        out.add_row(*columns.cells(row), style=None if row.work and row.kind == "kernel" else "dim")
    return out


def footer(summary: Summary) -> Iterator[Text]:
    """The total, and what the table leaves out."""
    yield Text(f"{summary.total:,} invocations" if summary.total else "nothing was recorded", "bold")
    if summary.more:
        yield Text(f"{summary.more:,} more rows: --top {len(summary.rows) + summary.more}", "dim")
    if summary.regions or summary.views:
        yield Text(
            f"hidden: regions {summary.regions:,}, views and allocations {summary.views:,} (--all shows them)", "dim"
        )


class _Columns:
    """Which columns these rows need, and what each row puts into them."""

    def __init__(self, summary: Summary) -> None:
        by, rows, self.total, self.gpu_us = summary.by, summary.rows, summary.total, summary.gpu_us
        self.metadata = summary.metadata
        self.told = RANK_COLUMNS if by == "rank" and summary.metadata and summary.metadata.ranks else ()
        self.phases: list[Phase] = [p for p in PHASES if by != "phase" and any(row.phases[p] for row in rows)]
        self.graphs = any(row.graph for row in rows)
        self.second = "arguments" if by == "kernel" else "calls"
        self.numbers = [*self.phases, *(["in graphs"] if self.graphs else []), "count", "share"]
        self.numbers += ["GPU time"] if self.gpu_us else []

    def cells(self, row: Row) -> Iterator[Text]:
        yield Text(row.name + (" (region)" if row.kind == "region" else "" if row.work else " (no work)"))
        if self.metadata and self.told:
            yield from rank_cells(self.metadata, row.name)
        yield Text(row.signature if self.second == "arguments" else f"{row.calls:,}")
        yield from (_number(row.phases[phase]) for phase in self.phases)
        if self.graphs:
            yield _number(row.graph)
        yield Text(f"{row.count:,}", "bold")
        yield Text(f"{row.count / self.total:.1%}" if self.total and row.kind == "kernel" else "")
        if self.gpu_us:
            yield Text(f"{row.gpu_us / self.gpu_us:.1%}" if row.gpu_us else "·", "" if row.gpu_us else "dim")


def _number(count: int) -> Text:
    return Text(f"{count:,}") if count else Text("·", "dim")


RANK_COLUMNS = ("stands at", "steps")


def rank_cells(metadata: Metadata, name: str) -> Iterator[Text]:
    """The COLUMNS of the row `rank N`; empty where the Recording does not tell (before format 1.4)."""
    rank = next((rank for rank in metadata.ranks if name == f"rank {rank.rank}"), None)
    yield Text("" if rank is None else _position(rank, metadata.ranks))
    yield Text("") if rank is None else _steps(rank)


def _position(rank: Rank, ranks: Sequence[Rank]) -> str:
    return ", ".join(f"{kind} {place} of {_size(kind, rank, ranks)}" for kind, place in sorted(rank.places.items()))


def _size(kind: str, rank: Rank, ranks: Sequence[Rank]) -> int:
    """Of the rank's group; replicas that form none are as many as are here."""
    return len(rank.groups.get(kind, ())) or max(other.places.get(kind, 0) for other in ranks) + 1


def _steps(rank: Rank) -> Text:
    told = ", ".join(f"{rank.steps[phase]:,} {phase}" for phase in PHASES if rank.steps.get(phase)) or "none"
    return Text(told) if rank.ended else Text(f"{told}, then killed", "bold yellow")


def describe_world(metadata: Metadata) -> str:
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

"""How `kcap show` looks: a Recording's header, then its rows as a table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kcap.schemas import rank_table
from kcap.schemas.recording import PHASES, Metadata, Phase
from kcap.schemas.summary import Row, Summary

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
        yield rank_table.world(metadata)


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
        self.told = rank_table.COLUMNS if by == "rank" and summary.metadata and summary.metadata.ranks else ()
        self.phases: list[Phase] = [p for p in PHASES if by != "phase" and any(row.phases[p] for row in rows)]
        self.graphs = any(row.graph for row in rows)
        self.second = "arguments" if by == "kernel" else "calls"
        self.numbers = [*self.phases, *(["in graphs"] if self.graphs else []), "count", "share"]
        self.numbers += ["GPU time"] if self.gpu_us else []

    def cells(self, row: Row) -> Iterator[Text]:
        yield Text(row.name + (" (region)" if row.kind == "region" else "" if row.work else " (no work)"))
        if self.metadata and self.told:
            yield from rank_table.cells(self.metadata, row.name)
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

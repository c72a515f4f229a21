"""How `kcap show` looks: a Recording's header, then its rows as a table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from rich.console import OverflowMethod
from rich.table import Table
from rich.text import Text

from kcap.schemas.recording.phases import PHASES
from kcap.schemas.recording.records import Metadata, Rank
from kcap.show.console import PIPED_WIDTH
from kcap.show.summary import Row, Summary

MOST_SIZES = 6  # padded sizes of CUDA graphs that the header names
LONGEST_NAME, SHORTEST_NAME, LEAST_ARGUMENTS = 48, 24, 24  # columns
KEPT_END = 10  # of a name that is cut: `.s0123456` and its like
PARTIAL = "PARTIAL: not all that ran is here: a process ended early, or a tap could not see it (see below)"
DROPPED = {
    "overflow": "{} invocations came after the most distinct calls that a process keeps: they are in no count",
    "samples": "{} samples were not kept: too large, or too many at once; counts are whole",
    "off_step": "not counted: {} invocations outside the engine's steps (between two, or on other threads), as usual",
    "traced": "not counted: {} invocations that only traced shapes for a compiler and computed nothing, as usual",
}


def header(metadata: Metadata) -> Iterator[Text]:
    """Who ran what, where, how much of it, and what went wrong while recording."""
    yield Text(identity(metadata), style="bold")
    yield Text(" · ".join(_circumstances(metadata)), style="dim")
    if metadata.steps:
        yield Text("steps: " + ", ".join(f"{metadata.steps[p]:,} {p}" for p in PHASES if metadata.steps.get(p)))
    if metadata.plan is not None:
        yield Text(f"with Solutions in the place of kernels: {', '.join(metadata.plan.solutions)}")
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
    yield metadata.model or ("an unnamed model" if metadata.framework else "a PyTorch program")
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
    for disagreement in metadata.disagreements:
        yield Text(f"RANKS DIFFER: {disagreement.text}", "bold yellow")
    for reason, count in metadata.dropped.items():
        lost = reason in ("overflow", "samples") or reason not in DROPPED
        text = DROPPED[reason].format(f"{count:,}") if reason in DROPPED else f"dropped: {reason}: {count:,}"
        yield Text(text, "yellow" if lost else "dim")
    for note in metadata.notes:
        yield Text(f"note: {note}", "dim")


def table(summary: Summary, columns: Columns, parts: bool = False) -> Table:
    """The rows. `parts`: a composite is followed by the operators that it ran as."""
    out = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    out.add_column(summary.by, max_width=columns.name_width, no_wrap=True, overflow="ellipsis")
    for name in columns.rank_columns:
        out.add_column(name, overflow="fold")
    if columns.second == "arguments":
        fold = columns.width >= PIPED_WIDTH
        overflow: OverflowMethod = "fold" if fold else "ellipsis"
        out.add_column(columns.second, no_wrap=not fold, overflow=overflow, max_width=columns.arguments_width)
    elif columns.second:
        out.add_column(columns.second, justify="right", no_wrap=True)
    if columns.varies_width:
        out.add_column("that differ in", no_wrap=True, overflow="ellipsis", max_width=columns.varies_width)
    for name in columns.numbers:
        out.add_column(name, justify="right", no_wrap=True)
    for row in summary.rows:
        out.add_row(*columns.cells(row), style=None if row.work and row.kind != "region" else "dim")
        for part in row.parts if parts else ():
            out.add_row(*columns.cells(part, part=True), style="dim")
    return out


def footer(summary: Summary, columns: Columns, parts: bool = False) -> Iterator[Text]:
    """The total, what orders the rows, and what the table leaves out."""
    distinct = f" of {summary.distinct:,} distinct calls" if summary.distinct else ""
    yield Text(f"{summary.total:,} invocations{distinct}" if summary.total else "nothing was recorded", "bold")
    if summary.in_families is not None and summary.total:
        yield Text(f"in named families: {summary.in_families / summary.total:.1%} of the invocations")
    if columns.dropped:
        yield Text(f"not shown in {columns.width} columns: {', '.join(columns.dropped)}", "dim")
    if summary.rates:
        yield Text(
            "cost: an estimate, from the bytes that each call moves and the FLOPs that it computes,"
            f" at {summary.rates}; kcap replay measures"
        )
    if any(row.kind == "composite" for row in summary.rows):
        shown = "" if parts else ": --parts shows them"
        yield Text(
            f"composite: 4 × 11 is an operator that was called 4 times and ran as 11 aten operators each time{shown}",
            "dim",
        )
    if summary.more:
        yield Text(f"{summary.more:,} more rows: --top {len(summary.rows) + summary.more}", "dim")
    if summary.regions or summary.views:
        yield Text(
            f"hidden: {summary.regions:,} distinct regions, {summary.views:,} distinct views and allocations"
            " (--all shows them; no total or share counts them)",
            "dim",
        )


class Columns:
    """Which columns these rows need and `width` has room for, and what each row puts into them.

    There is one for each phase that occurs. Where `width` is short, columns go in this order: seams, calls in graphs,
    distinct calls, phases, the share of the count.
    """

    def __init__(self, summary: Summary, width: int) -> None:
        by, rows, self.total, self.metadata = summary.by, summary.rows, summary.total, summary.metadata
        self.width = width
        self.gpu_us, self.estimated_us = summary.gpu_us, summary.estimated_us
        self.rank_columns = RANK_COLUMNS if by == "rank" and summary.metadata and summary.metadata.ranks else ()
        phases = [p for p in PHASES if by != "phase" and any(row.phases[p] for row in rows)]
        graphs = ["in graphs"] if any(row.graph for row in rows) else []
        time = ["GPU time"] if self.gpu_us else ["cost"] if self.estimated_us else []
        self.second = "arguments" if by == "kernel" else "calls"
        seams = ["seam"] if by == "family" else []
        self.numbers = [*phases, *graphs, "count", "share", *time, *seams]
        longest = max((len(self._name(row)) for row in rows), default=0)
        self.name_width = min(longest, LONGEST_NAME if by == "kernel" or width < PIPED_WIDTH else width)
        self.dropped: list[str] = []
        for dropped in (seams, graphs, ["calls"], phases, ["share"]):
            if self._fixed_width(rows) + LEAST_ARGUMENTS * (by == "kernel") <= width:
                break
            self.dropped += [name for name in dropped if name in (*self.numbers, self.second)]
            self.numbers = [name for name in self.numbers if name not in dropped]
            self.second = "" if self.second in dropped else self.second
        spare = width - self._fixed_width(rows)
        if lacking := max((LEAST_ARGUMENTS if by == "kernel" else 0) - spare, 0):
            self.name_width = max(min(longest, SHORTEST_NAME), self.name_width - lacking)
        elif by != "kernel":
            self.name_width = min(longest, self.name_width + spare)
        self.arguments_width = max(width - self._fixed_width(rows), LEAST_ARGUMENTS)
        self.varies_width = 0
        if (
            by == "operator"
            and any(row.varies for row in rows)
            and width - self._fixed_width(rows) - 2 >= LEAST_ARGUMENTS
        ):
            self.varies_width = width - self._fixed_width(rows) - 2

    def _fixed_width(self, rows: Sequence[Row]) -> int:
        """All columns' but the arguments', with the two blanks after each."""
        digits = max((len(count_text(row)) for row in rows), default=1)
        texts = {"share": 6, "GPU time": 6, "cost": 6, "seam": max((len(_seams(row)) for row in rows), default=0)}
        widths = [max(len(name), texts.get(name, digits)) for name in self.numbers]
        widths += {"arguments": [0], "calls": [5], "": []}[self.second] + [24] * len(self.rank_columns)
        return self.name_width + 2 + sum(width + 2 for width in widths)

    @staticmethod
    def _name(row: Row) -> str:
        kind = "" if row.kind == "kernel" else f" ({row.kind})"
        return row.name + (kind if row.work or kind else " (no work)")

    def cells(self, row: Row, part: bool = False) -> Iterator[Text]:
        yield Text(_shorten(f"  {row.name}" if part else self._name(row), self.name_width))
        if self.metadata and self.rank_columns:
            yield from rank_cells(self.metadata, row.name)
        if self.second:
            more = f", or {row.shapes - 1:,} more of its size" if self.second == "arguments" and row.shapes > 1 else ""
            yield Text(row.signature + more if self.second == "arguments" else f"{max(row.calls, row.shapes):,}")
        if self.varies_width:
            yield Text(row.varies, "dim")
        for name in self.numbers:
            yield self._number(row, name)

    def _number(self, row: Row, name: str) -> Text:
        match name:
            case "count":
                return Text(count_text(row), "bold")
            case "share":
                counts = self.total and row.work and row.kind != "region"
                return Text(f"{row.invocations / self.total:.1%}" if counts else "")
            case "seam":
                return Text(_seams(row))
            case "in graphs":
                return _number(row.graph)
            case "GPU time" | "cost":
                time, whole = (row.gpu_us, self.gpu_us) if name == "GPU time" else (row.estimated_us, self.estimated_us)
                return Text(f"{time / whole:.1%}" if time else "·", "" if time else "dim")
        return _number(row.phases[name])


def _seams(row: Row) -> str:
    return ", ".join(sorted(seam or "none" for seam in row.seams))


def count_text(row: Row) -> str:
    """`4`; of a composite `4 × 11`, its calls and what each ran as."""
    return f"{row.count:,}" if row.kernels is None else f"{row.count:,} × {row.kernels / max(row.count, 1):.3g}"


def _shorten(name: str, width: int) -> str:
    """`name` in `width` columns; its end stays, where a fused kernel's id is."""
    return name if len(name) <= width else f"{name[: width - KEPT_END - 1]}…{name[-KEPT_END:]}"


def _number(count: int) -> Text:
    return Text(f"{count:,}") if count else Text("·", "dim")


RANK_COLUMNS = ("position", "steps")


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
    steps = ", ".join(f"{rank.steps[phase]:,} {phase}" for phase in PHASES if rank.steps.get(phase)) or "none"
    return Text(steps) if rank.ended else Text(f"{steps}, then killed", "bold yellow")


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

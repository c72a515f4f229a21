"""`kcap diff`: what two Recordings, trace files or datasets have that the other has not, or in other numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
import orjson
from rich.table import Table
from rich.text import Text

from kcap.bench.contents import Contents, open_contents
from kcap.errors import CallError, KcapError
from kcap.schemas.diff import Diff, Entry, diff_calls, diff_datasets
from kcap.schemas.recording.records import Call, Metadata
from kcap.schemas.recording.signature import call_key
from kcap.schemas.results import measurement
from kcap.show.console import console
from kcap.show.recording import identity

if TYPE_CHECKING:  # these need torch: a comparison by call does without
    from kcap.schemas.derive.engine_comparison import (
        ComparedRecording,
        EnginePhase,
        FamilyDiff,
        KernelShare,
        PhaseDiff,
        PurposeRow,
        TimeOf,
    )

EQUAL, DIFFERENT = 0, 1
BY = ("call", "family")


@click.command(epilog="\b\nExample:\n  kcap diff vllm.kcap sglang.kcap")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--by", type=click.Choice(BY), help="What a row is.  [default: family, of two engines' Recordings]")
@click.option("--measurements", type=click.Path(path_type=Path, exists=True), multiple=True, help="Times of A, of B.")
@click.option("--rows", type=click.IntRange(min=1), default=20, show_default=True, help="Rows of each table.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(a: Path, b: Path, by: str | None, measurements: tuple[Path, ...], rows: int, as_json: bool) -> int:
    """Tell which calls only A or only B has, and whose counts differ; of datasets, which Definitions.

    A and B are Recordings, BackendBench trace files or parquets, or FlashInfer-Bench datasets. Recordings of two
    engines are compared by family: what each runs for a kernel in the mean step of a phase. --measurements, given
    twice, adds the times that `kcap replay A -o FILE` and `kcap replay B -o FILE` measured. Exit code: 0 they are
    equal, 1 they differ, 2 they cannot be compared.
    """
    try:
        first, second = _opened(a), _opened(b)
        by = by or ("family" if measurements or _two_engines(first, second) else "call")
        if by == "call" and measurements:
            raise CallError("--measurements are of a comparison --by family")
        found = compare_families(first, second, measurements) if by == "family" else compare_calls(first, second)
    except KcapError as error:  # the exit code 1 would say that they differ
        raise CallError(str(error)) from error
    if as_json:
        whole = {"a": str(a), "b": str(b), "by": by, **found.as_json()}
        click.echo(orjson.dumps(whole, option=orjson.OPT_INDENT_2))
    elif isinstance(found, Diff):
        _show_calls(found, rows)
    else:
        show_families(found, first.metadata, second.metadata, rows, bool(measurements))
    return EQUAL if found.equal else DIFFERENT


def _opened(path: Path) -> Contents:
    try:
        return open_contents(path, allow_truncated=True)
    except OSError as error:
        raise CallError(f"{error.filename or path}: {error.strerror}") from error


def _two_engines(a: Contents, b: Contents) -> bool:
    engines = {one.metadata.framework for one in (a, b) if one.recording is not None}
    return len(engines) == 2 and None not in engines


def compare_calls(a: Contents, b: Contents) -> Diff:
    """CallError for a dataset and something else."""
    if a.dataset is not None and b.dataset is not None:
        return diff_datasets(a.dataset, b.dataset)
    if a.dataset is not None or b.dataset is not None:
        raise CallError(f"{a.path}, {b.path}: a dataset is compared with a dataset only")
    return diff_calls(a.calls, b.calls)


def _show_calls(found: Diff, rows: int) -> None:
    out = console()
    if found.equal:
        out.print(f"equal: {found.totals[0]:,} invocations each")
        return
    out.print(_sums(found, rows))
    for title, entries in (("only in A", found.only_a), ("only in B", found.only_b)):
        if entries:
            out.print(f"\n{title}: {len(entries):,}", style="bold")
            out.print(_entries(entries[:rows]))
    if found.changed:
        out.print(f"\nin both, but different: {len(found.changed):,}", style="bold")
        out.print(_changes(found, rows))


def _table(*numbers: str, names: tuple[str, ...] = ("name",)) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _sums(found: Diff, rows: int) -> Table:
    table, (a, b) = _table("A", "share", "B", "share", "B - A"), found.totals
    for one in found.names[:rows]:
        shares = (f"{one.a / max(a, 1):.1%}", f"{one.b / max(b, 1):.1%}")
        table.add_row(one.name, f"{one.a:,}", shares[0], f"{one.b:,}", shares[1], f"{one.b - one.a:+,}")
    table.add_row("all", f"{a:,}", "", f"{b:,}", "", f"{b - a:+,}", style="bold")
    return table


def _entries(entries: list[Entry]) -> Table:
    table = _table("count", names=("name", "what"))
    for entry in entries:
        table.add_row(entry.name, entry.detail, f"{sum(entry.counts.values()):,}")
    return table


def _changes(found: Diff, rows: int) -> Table:
    table = _table(names=("name", "what", "A → B"))
    for one in found.changed[:rows]:
        table.add_row(one.a.name, one.a.detail, ", ".join([*one.fields, *_moves(one.a, one.b)]))
    return table


def _moves(a: Entry, b: Entry) -> Iterator[str]:
    """`decode 0 graph 64 → 128`, for each count that differs."""
    for place in dict.fromkeys([*a.counts, *b.counts]):
        before, after = a.counts.get(place, 0), b.counts.get(place, 0)
        if before != after:
            yield f"{place} {before:,} → {after:,}"


LONGEST = 60  # characters of arguments
COMPARES = "batches differ: counts of a step compare, times and shapes do not"


def compare_families(a: Contents, b: Contents, measured: tuple[Path, ...]) -> FamilyDiff:
    """CallError unless both are Recordings, and measured or not alike. `measured`: none, or of A and of B."""
    if measured and len(measured) != 2:
        raise CallError("--measurements is given twice: of A, then of B")
    from kcap.schemas.derive.engine_comparison import compare_engines

    if not any(a.metadata.steps.values()) and not any(b.metadata.steps.values()):
        raise CallError("neither Recording has steps, of which counts would be compared: compare them --by call")
    first, second = measured or (None, None)
    return compare_engines(_recorded(a, first), _recorded(b, second))


def _recorded(contents: Contents, measured: Path | None) -> ComparedRecording:
    if contents.recording is None:
        raise CallError(f"{contents.path}: only Recordings have phases and families: compare it --by call")
    from kcap.schemas.derive.engine_comparison import ComparedRecording

    if measured is None:
        return ComparedRecording(contents.calls, contents.metadata, None, contents.recording)
    return ComparedRecording(contents.calls, contents.metadata, read_times(measured, contents), contents.recording)


def read_times(path: Path, contents: Contents) -> TimeOf:
    """What `kcap replay PATH -o` measured of `contents`; CallError where it is of none of its calls."""
    timed: dict[str, list[measurement.Measurement]] = defaultdict(list)
    for line in measurement.on_the_device(list(measurement.read_measurements(path))):
        timed[line.key].append(line)
    if not timed.keys() & {call_key(call) for call in contents.calls}:
        raise CallError(f"{path}: of no call of {contents.path} (kcap replay {contents.path} -o {path} measures them)")

    def time(call: Call, phase: str) -> float | None:
        return measurement.mean_us(timed.get(call_key(call), ()), phase)

    return time


def show_families(found: FamilyDiff, a: Metadata, b: Metadata, rows: int, timed: bool) -> None:
    out = console()
    for letter, metadata in (("A", a), ("B", b)):
        out.print(Text(f"{letter}  {identity(metadata)}", "bold"))
    for warning in found.warnings:
        out.print(Text(warning, "yellow"))
    for phase in found.phases:
        out.print()
        out.print(*_head(phase, timed), sep="\n")
        out.print(_Table(phase, a, b, rows, timed).table)
    for name, (in_a, in_b) in found.alone.items():
        out.print(Text(f"\n{name}: {_sized(in_a, 'step')} in A, {in_b:,} in B: not compared", "yellow"))


def _head(phase: PhaseDiff, timed: bool) -> Iterator[Text]:
    yield Text(f"{phase.phase}: A {_batches(phase.a)}; B {_batches(phase.b)}", "bold")
    if not phase.same_batches:
        yield Text(COMPARES, "yellow")
    for letter, side in (("A", phase.a), ("B", phase.b)) if timed else ():
        if side.untimed:
            yield Text(f"{letter}: {format_count(side.untimed)} invocations of a step have no time", "yellow")


def _batches(side: EnginePhase) -> str:
    """`7 steps of 3 to 4 tokens (3 to 4 sequences)`."""
    tokens = _range([tokens for _, tokens in side.batches], "token")
    sequences = _range([sequences for sequences, _ in side.batches], "sequence")
    told = f" of {tokens} ({sequences})" if tokens and sequences else ""
    return f"{_sized(side.steps, 'step')}{told}"


def _range(sizes: list[int], unit: str) -> str:
    if not sizes:
        return ""
    low, high = min(sizes), max(sizes)
    return f"{low:,} to {_sized(high, unit)}" if high > low else _sized(high, unit)


def _sized(size: int, unit: str) -> str:
    return f"{size:,} {unit}{'' if size == 1 else 's'}"


def format_count(count: float) -> str:
    return f"{count:,.2f}".rstrip("0").rstrip(".")


class _Table:
    """A phase: what both run, then what only one does, then the sums."""

    def __init__(self, phase: PhaseDiff, a: Metadata, b: Metadata, rows: int, timed: bool) -> None:
        from kcap.schemas.derive.engine_comparison import purposes

        self.phase, self.timed, self.rows = phase, timed, rows
        self.table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        self.table.add_column("kernel", overflow="fold")
        for letter, metadata in (("A", a), ("B", b)):
            self.table.add_column(f"{letter}: {metadata.framework or 'a PyTorch program'}", overflow="fold")
            for name in ("a step", "µs a step") if timed else ("a step",):
                self.table.add_column(name, justify="right", no_wrap=True)
        groups = purposes(phase.lines)
        for title, chosen in SECTIONS.items():
            self._section(title, {name: lines for name, lines in groups.items() if chosen(lines)})
        a_cells, b_cells = (self._cells("", side.count, side.us) for side in (phase.a, phase.b))
        self._add("all", a_cells, b_cells, style="bold")

    def _section(self, title: str, groups: Mapping[str, list[PurposeRow]]) -> None:
        if title and groups:
            self.table.add_row("")
            self.table.add_row(Text(title, "bold"))
        for name, lines in list(groups.items())[: self.rows]:
            self._group(name, lines)
        if len(groups) > self.rows:
            self.table.add_row(Text(f"… {len(groups) - self.rows} more: --rows {len(groups)}", "dim"))

    def _group(self, name: str, lines: list[PurposeRow]) -> None:
        alone = len(lines) == 1
        if not alone:
            first = self._sum([line.a for line in lines], self.phase.a, name)
            self._add(name, first, self._sum([line.b for line in lines], self.phase.b, name))
        for line in lines:
            self._add(line.name if alone else f"  {line.name}", self._ran(line, line.a), self._ran(line, line.b))

    def _sum(self, ran: list[KernelShare | None], side: EnginePhase, name: str) -> list[str]:
        there = [one for one in ran if one]
        us = sum(one.us or 0.0 for one in there) + side.within.get(name, 0.0)
        return self._cells("", sum(one.count for one in there), us)

    def _ran(self, line: PurposeRow, ran: KernelShare | None) -> list[str]:
        if ran is None:
            return self._cells("·", 0, None)
        return self._cells(_what(line, ran), ran.count, ran.us)

    def _cells(self, what: str, count: float, us: float | None) -> list[str]:
        return [what, format_count(count) if count else "·", *([f"{us:,.1f}" if us else "·"] if self.timed else [])]

    def _add(self, name: str, a: list[str], b: list[str], *, style: str | None = None) -> None:
        self.table.add_row(*(Text(cell) for cell in (name, *a, *b)), style=style)


def _in_both(lines: list[PurposeRow]) -> bool:
    return any(line.a for line in lines) and any(line.b for line in lines)


SECTIONS: dict[str, Callable[[list[PurposeRow]], bool]] = {
    "": lambda lines: bool(lines[0].purpose) and _in_both(lines),
    "of no family, in both": lambda lines: not lines[0].purpose and _in_both(lines),
    "only in A": lambda lines: not any(line.b for line in lines),
    "only in B": lambda lines: not any(line.a for line in lines),
}


def _what(line: PurposeRow, ran: KernelShare) -> str:
    """The operators of a Definition; of an operator that has none, its arguments in short."""
    from kcap.schemas.recording.operators import base_of

    if {base_of(operator) for operator in ran.operators} != {line.name}:
        return ", ".join(ran.operators)
    first, *more = sorted(ran.arguments, key=lambda name: -ran.arguments[name])
    told = first if len(first) <= LONGEST else first[: LONGEST - 1] + "…"
    return f"{told} and {len(more)} more" if more else told

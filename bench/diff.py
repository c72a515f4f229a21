"""`kcap diff`: what two Recordings, trace files or datasets have that the other has not, or in other numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import orjson
from rich.table import Table

from kcap.bench.contents import Contents, open_contents
from kcap.bench.diff_families import compare as compare_families
from kcap.bench.diff_families import show as show_families
from kcap.errors import CallError
from kcap.schemas.diff import Diff, Entry, diff_calls, diff_datasets
from kcap.schemas.tables import console

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
    equal, 1 they differ.
    """
    first, second = open_contents(a, allow_truncated=True), open_contents(b, allow_truncated=True)
    by = by or ("family" if measurements or _two_engines(first, second) else "call")
    if by == "call" and measurements:
        raise CallError("--measurements are of a comparison --by family")
    found = compare_families(first, second, measurements) if by == "family" else compare(first, second)
    if as_json:
        whole = {"a": str(a), "b": str(b), "by": by, **found.as_json()}
        click.echo(orjson.dumps(whole, option=orjson.OPT_INDENT_2))
    elif isinstance(found, Diff):
        _show(found, rows)
    else:
        show_families(found, first.metadata, second.metadata, rows, bool(measurements))
    return EQUAL if found.equal else DIFFERENT


def _two_engines(a: Contents, b: Contents) -> bool:
    engines = {one.metadata.framework for one in (a, b) if one.recording is not None}
    return len(engines) == 2 and None not in engines


def compare(a: Contents, b: Contents) -> Diff:
    """CallError for a dataset and something else."""
    if a.dataset is not None and b.dataset is not None:
        return diff_datasets(a.dataset, b.dataset)
    if a.dataset is not None or b.dataset is not None:
        raise CallError(f"{a.path}, {b.path}: a dataset is compared with a dataset only")
    return diff_calls(a.calls, b.calls)


def _show(found: Diff, rows: int) -> None:
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

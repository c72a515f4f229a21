"""`kcap show`: what ran, for people as a table and for programs as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click
import orjson

from kcap.errors import CallError
from kcap.schemas.input_kind import detect_input, trace_lines
from kcap.schemas.recording.recording import load
from kcap.show.summary import BY, By, Summary, of_recording, of_trace

TOP = 40
INDENT = orjson.OPT_INDENT_2


@click.command(epilog="\b\nExample:\n  kcap show llama.kcap --by operator")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--by", type=click.Choice(BY), default="kernel", show_default=True, help="What a row is.")
@click.option("--all", "everything", is_flag=True, help="Show regions, views and allocations too.")
@click.option("--top", type=click.IntRange(min=1), help=f"Rows to show.  [default: {TOP}; with --json all]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(path: Path, by: str, everything: bool, top: int | None, as_json: bool) -> None:
    """Show what ran, by kernel, operator, family, phase or rank.

    PATH is a Recording, a BackendBench trace file or parquet, or a FlashInfer-Bench dataset, of which the Definitions
    are shown. Regions, views and allocations are hidden unless --all.
    """
    top = top or (None if as_json else TOP)
    if detect_input(path) == "dataset":
        _show_dataset(path, top, as_json)
        return
    summary = _of_path(path, cast(By, by), everything, top)
    if as_json:
        click.echo(orjson.dumps(summary.as_json(), option=INDENT))
    else:
        _print(path, summary)


def _of_path(path: Path, by: By, everything: bool, top: int | None) -> Summary:
    if detect_input(path) == "recording":
        return of_recording(load(path), by, everything, top)
    if by not in ("kernel", "operator"):
        raise CallError(f"{path}: a trace file tells no phases, ranks or families: show it --by kernel or operator")
    return of_trace(trace_lines(path), by, top)


def _show_dataset(path: Path, top: int | None, as_json: bool) -> None:
    from kcap.schemas.flashinfer.dataset import Dataset
    from kcap.show.dataset import definition_rows, definition_table
    from kcap.show.recording import console

    rows = definition_rows(Dataset.load(path))
    if as_json:
        shown = [row.as_json() for row in rows[:top]]
        click.echo(orjson.dumps({"definitions": shown, "more": len(rows[top:]) if top else 0}, option=INDENT))
        return
    out = console()
    out.print(definition_table(rows[:top]))
    out.print(f"\n{len(rows):,} Definitions, {sum(row.workloads for row in rows):,} workloads", style="bold")
    click.echo(f"Next: kcap export {path} --to kernelbench -o {path.name}.kernelbench", err=True)


def _print(path: Path, summary: Summary) -> None:
    from kcap.show.recording import console, footer, header, table

    out = console()
    for line in header(summary.metadata) if summary.metadata else ():
        out.print(line)
    out.print()
    out.print(table(summary))
    out.print()
    for line in footer(summary):
        out.print(line)
    click.echo(f"Next: kcap replay {path}", err=True)

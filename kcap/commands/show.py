"""`kcap show`: what ran, for people as a table and for programs as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
import orjson

from kcap.commands import given_options
from kcap.errors import CallError
from kcap.schemas.input_kind import detect_input, trace_lines
from kcap.schemas.recording.recording import Recording, load
from kcap.show.estimate import Rates
from kcap.show.summary import BY, By, Summary, of_recording, of_trace

if TYPE_CHECKING:
    from kcap.show.gain import CallTime

TOP = 40
INDENT = orjson.OPT_INDENT_2
BY_REQUESTS = ("request", "turn", "session")


@click.command(epilog="\b\nExample:\n  kcap show llama.kcap --by operator")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--by", type=click.Choice((*BY, *BY_REQUESTS)), help="What a row is.  [default: kernel]")
@click.option("--all", "everything", is_flag=True, help="Show regions, views and allocations too.")
@click.option("--parts", is_flag=True, help="Show what a composite operator ran as, below it.")
@click.option("--top", type=click.IntRange(min=1), help=f"Rows to show.  [default: {TOP}; with --json all]")
@click.option(
    "--measurements",
    type=click.Path(path_type=Path),
    help="Times for --by request, turn or session: of kcap replay -o.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    path: Path, by: str | None, everything: bool, parts: bool, top: int | None, measurements: Path | None, as_json: bool
) -> None:
    """Show what ran, by kernel, operator, family, phase, rank or request, the costliest first.

    PATH is a Recording, a BackendBench trace file or parquet, a FlashInfer-Bench dataset, of which the Definitions are
    shown, or an agent trace, of which the turns are. Cost is the GPU time of the profiled steps (kcap record
    --check-coverage), else an estimate. A fused operator that the engine ran as several of aten's is one row; --json
    lists its parts as rows of their own. Regions, views and allocations are hidden unless --all. By request (of vLLM,
    and of SGLang without speculative decoding): its tokens, found in the prefix cache, computed and generated, its
    steps, and its share of their GPU time; by turn and session where kcap record --agent-trace kept them.
    """
    top = top or (None if as_json else TOP)
    dataset = detect_input(path) == "dataset"
    if dataset or _is_agent_trace(path):
        if options := given_options(("by", "everything", "parts", "measurements")):
            kind = "a dataset" if dataset else "an agent trace"
            raise CallError(f"{path} is {kind}: {options}: of what was recorded only")
        (_show_dataset if dataset else _show_agent_trace)(path, top, as_json)
        return
    by = by or "kernel"
    if by in BY_REQUESTS:
        _show_requests(path, by, measurements, top, as_json)
        return
    if measurements is not None:
        raise CallError(f"--measurements: of --by {', '.join(BY_REQUESTS)} only")
    summary = _of_path(path, cast(By, by), everything, top, fold=not as_json)
    if as_json:
        click.echo(orjson.dumps(summary.as_json(), option=INDENT))
    else:
        _print(path, summary, parts)


def _of_path(path: Path, by: By, everything: bool, top: int | None, fold: bool) -> Summary:
    if detect_input(path) == "recording":
        recording = load(path)
        return of_recording(recording, by, everything, top, measured_rates(recording), fold)
    if by not in ("kernel", "operator"):
        raise CallError(f"{path}: a trace file tells no phases, ranks or families: show it --by kernel or operator")
    return of_trace(trace_lines(path), by, top)


def _show_requests(path: Path, by: str, measurements: Path | None, top: int | None, as_json: bool) -> None:
    from kcap.show.console import console
    from kcap.show.recording import header
    from kcap.show.requests import request_footer, request_table, summarize_requests

    if detect_input(path) != "recording":
        raise CallError(f"{path} is no Recording: only one tells of requests")
    recording = load(path)
    summary = summarize_requests(recording, *times_of_requests(recording, measurements), by)
    if as_json:
        click.echo(orjson.dumps(summary.as_json(top), option=INDENT))
        return
    out = console()
    for line in header(recording.metadata):
        out.print(line)
    out.print()
    out.print(request_table(summary, summary.rows[:top], out.width))
    out.print()
    for line in request_footer(summary):
        out.print(line)
    if more := len(summary.rows) - len(summary.rows[:top]):
        out.print(f"{more:,} more rows: --top {len(summary.rows)}", style="dim")


def times_of_requests(recording: Recording, measurements: Path | None) -> tuple[Mapping[int, CallTime], str]:
    """By the Call's id, what is shared out among requests, and where it is from; empty where nothing is known."""
    from kcap.schemas.results.measurement import read_measurements
    from kcap.show.gain import measured_times
    from kcap.show.requests import call_times

    if measurements is not None:
        return measured_times(recording, read_measurements(measurements)), f"times: {measurements}"
    return call_times(recording, measured_rates(recording))


def measured_rates(recording: Recording) -> Rates | None:
    """The rates of the recorded device, where `kcap replay` measured them on this machine."""
    from kcap.replay.roofline.ceilings import ceilings_of_device

    ceilings = ceilings_of_device(recording.metadata.device)
    if ceilings is None or not ceilings.tflop_s:
        return None
    fastest = ceilings.tflop_s.get("bfloat16") or max(ceilings.tflop_s.values())
    return Rates(ceilings.memory_gb_s, fastest, "measured here")


def _show_dataset(path: Path, top: int | None, as_json: bool) -> None:
    from kcap.schemas.flashinfer.dataset import Dataset
    from kcap.show.console import console, print_table
    from kcap.show.dataset import definition_rows, definition_table

    rows = definition_rows(Dataset.load(path))
    if as_json:
        shown = [row.as_json() for row in rows[:top]]
        click.echo(orjson.dumps({"definitions": shown, "more": len(rows[top:]) if top else 0}, option=INDENT))
        return
    out = console()
    print_table(out, definition_table(rows[:top], out.width))
    out.print(f"\n{len(rows):,} Definitions, {sum(row.workloads for row in rows):,} workloads", style="bold")
    output = shlex.quote(f"{path.resolve().name}.kernelbench")
    click.echo(f"Next: kcap export {shlex.quote(str(path))} --to kernelbench -o {output}", err=True)


def _is_agent_trace(path: Path) -> bool:
    from kcap.schemas.validation.formats import detect_format

    return path.is_file() and detect_format(path) == "agent-trace"  # a pipe can be read once only


def _show_agent_trace(path: Path, top: int | None, as_json: bool) -> None:
    from kcap.schemas.flashinfer import agent_trace
    from kcap.show.agent_trace import turn_rows, turn_table
    from kcap.show.console import console, print_table

    rows = turn_rows(agent_trace.read(path))
    more = len(rows[top:]) if top else 0
    if as_json:
        click.echo(orjson.dumps({"turns": [row.as_json() for row in rows[:top]], "more": more}, option=INDENT))
        return
    out = console()
    print_table(out, turn_table(rows[:top]))
    out.print(f"\n{len(rows):,} turns{f', {more:,} more with --top' if more else ''}", style="bold")


def _print(path: Path, summary: Summary, parts: bool) -> None:
    from kcap.show.console import console
    from kcap.show.recording import Columns, footer, header, table

    out = console()
    for line in header(summary.metadata) if summary.metadata else ():
        out.print(line)
    out.print()
    columns = Columns(summary, out.width)
    if summary.rows:
        out.print(table(summary, columns, parts))
        out.print()
    for line in footer(summary, columns, parts):
        out.print(line)
    if summary.total:
        click.echo(f"Next: kcap replay {shlex.quote(str(path))}", err=True)

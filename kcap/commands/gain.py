"""`kcap gain`: what could be gained of a Recording, and where, before anyone writes a kernel."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import orjson

from kcap.commands.show import measured_rates
from kcap.errors import CallError
from kcap.schemas.input_kind import detect_input
from kcap.schemas.recording.recording import Recording, load
from kcap.schemas.results.measurement import read_measurements

if TYPE_CHECKING:
    from kcap.show.gain import CallTime, Gain, Gains

TOP = 20


@click.command(epilog="\b\nExample:\n  kcap gain llama.kcap --measurements llama.measurements.jsonl")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--measurements",
    type=click.Path(path_type=Path),
    help="Times of the engine's kernels: of kcap replay PATH -o.  [default: the profiled steps of the Recording]",
)
@click.option("--top", type=click.IntRange(min=1), help=f"Rows to show.  [default: {TOP}; with --json all]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(path: Path, measurements: Path | None, top: int | None, as_json: bool) -> None:
    """Show what could be gained of a Recording: by kernel, what a perfect one would save of each phase.

    A row is a Definition, or an operator that has none: its share of the GPU time, that time over the device's floor,
    the most that any kernel in its place could save of each phase and of the whole mix that was recorded, and its
    seam: where the engine lets itself be given another kernel (a registered operator, a Triton launch, a library's
    function). Attention that cannot be replaced says why. Times are those of kcap replay, or of the steps that kcap
    record --check-coverage profiled.
    """
    if measurements is not None:
        _check_file(measurements)
    if detect_input(path) != "recording":
        raise CallError(f"{path} is no Recording: only one tells what an engine's steps are made of")
    found = _found(load(path), measurements)
    shown = found.rows[: top or (None if as_json else TOP)]
    if as_json:
        document = found.as_json()
        click.echo(orjson.dumps({**document, "rows": document["rows"][: len(shown)]}, option=orjson.OPT_INDENT_2))
        return
    _print(path, found, shown)


def _found(recording: Recording, measurements: Path | None) -> Gains:
    from kcap.show.gain import gains

    if (known := known_times(recording, measurements)) is not None:
        return gains(recording, *known)
    raise CallError(
        f"{recording.path}: has no times: kcap replay {shlex.quote(str(recording.path))} -o FILE measures them, "
        "for --measurements FILE; kcap record --check-coverage profiles steps"
    )


def known_times(recording: Recording, measurements: Path | None) -> tuple[Mapping[int, CallTime], str] | None:
    """What the kernels of `recording` took, by the Call's id, and where that is from; None where nobody timed them.

    CallError where `measurements` are not there, or of no Call of it.
    """
    from kcap.show.estimate import typical_rates
    from kcap.show.gain import measured_times, profiled_times

    if measurements is not None:
        _check_file(measurements)
        return measured_times(recording, read_measurements(measurements)), f"times and floors: {measurements}"
    rates = measured_rates(recording) or typical_rates(recording)
    if times := profiled_times(recording, rates):
        return times, f"times: the profiled steps; floors: the least that a kernel could take, at {rates}"
    return None


def _check_file(measurements: Path) -> None:
    if not measurements.is_file():
        raise CallError(f"{measurements}: no such file (kcap replay PATH -o {measurements} writes one)")


def _print(path: Path, found: Gains, shown: Sequence[Gain]) -> None:
    from rich.text import Text

    from kcap.show.console import console, plain_table, print_table

    out = console()
    columns = [f"{phase} most" for phase in found.phases]
    table = plain_table(["count", "share", "× floor", *columns], ["seam", "kernel"])
    for row in shown:
        table.add_row(*_cells(found, row))
    print_table(out, table)
    hidden = len(found.rows) - len(shown)
    out.print(Text(f"\n{_whole(found)}", "bold"))
    if hidden:
        out.print(Text(f"{hidden:,} more rows: --top {len(found.rows)}", "dim"))
    out.print(Text(found.source, "dim"))
    if found.untimed:
        out.print(Text(f"{found.untimed:,} invocations have no time: they are in no share", "dim"))
    best = next((row.name for row in found.rows if row.has_definition and row.seams), None)
    if best:
        click.echo(f"Next: kcap task {shlex.quote(str(path))} --definition {best} -o task", err=True)


def _cells(found: Gains, row: Gain) -> list[str]:
    from kcap.show.console import floor_factor

    over = row.times_floor
    most = [f"{found.most(row, phase):.1%}" if row.count[phase] and row.seams else "" for phase in found.phases]
    share = f"{found.share(row, 'all'):.1%}" if found.total_us else ""
    seam = ", ".join(sorted(row.seams)) or "none"
    name = row.name if row.seams or not row.why_no_seam else f"{row.name} ({row.why_no_seam})"
    return [f"{row.count['all']:,}", share, "?" if over is None else floor_factor(over), *most, seam, name]


def _whole(found: Gains) -> str:
    """What all perfect kernels would save together, of each phase."""
    parts = [f"{sum(found.most(row, phase) for row in found.rows):.1%} of {phase}" for phase in found.phases]
    return f"at the floor, all kernels with a seam would save {', '.join(parts)}"

"""`kcap export`: write what was recorded in another benchmark's format."""

from __future__ import annotations

from pathlib import Path

import click

from kcap.bench.contents import CheckTarget, Contents, open_contents
from kcap.bench.exports import Exporter, ExportRequest, find_exporter, targets
from kcap.errors import CallError
from kcap.schemas.results import export_loss as loss_file
from kcap.schemas.results.export_loss import ExportLoss, Lost
from kcap.system.output import OutputKind, atomic_directory, check_output

EXPORT = OutputKind((loss_file.FILE,), "not made by kcap export, and is not replaced: choose another -o")
MOST_SHOWN = 5


@click.command(epilog="\b\nExample:\n  kcap export llama.kcap --to backendbench -o llama.backendbench")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--to", "target", type=click.Choice(targets()), required=True, help="Whose format.")
@click.option("-o", "output", type=click.Path(path_type=Path), required=True, help="The folder to write.")
@click.option("--allow-truncated", is_flag=True, help="Export a Recording of fewer layers than the model has.")
@click.option("--measurements", type=click.Path(path_type=Path), help="Times for BackendBench: of kcap replay -o.")
@click.option("--check/--no-check", default=True, help="Run each reference against the recorded operator.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Where to check. Default: as recorded.")
@click.option("--trust", is_flag=True, help="Run the kernel sources of a Recording that was made elsewhere.")
@click.option("--force", is_flag=True, help="Replace the output.")
def command(
    path: Path,
    target: str,
    output: Path,
    allow_truncated: bool,
    measurements: Path | None,
    check: bool,
    device: str | None,
    trust: bool,
    force: bool,
) -> None:
    """Write what was recorded in another benchmark's format, and what that format cannot carry.

    PATH is a Recording, a BackendBench trace file or parquet, or a FlashInfer-Bench dataset. `loss.json` in the output
    tells in numbers what the target cannot carry.
    """
    chosen = find_exporter(target)
    if measurements is not None and not measurements.is_file():
        raise CallError(f"{measurements}: no such file (kcap replay PATH -o {measurements} writes one)")
    contents = open_contents(path, allow_truncated)
    check_takes(contents, target, chosen)
    check_output(output, force, kind=EXPORT, sources=[path])
    with atomic_directory(output) as folder:
        loss = chosen.write(ExportRequest(contents, folder, measurements, check, CheckTarget(device, trust)))
        loss_file.write(folder / loss_file.FILE, loss)
    click.echo(summary(loss, output))
    click.echo(f"Next: {chosen.following(output)}", err=True)


def check_takes(contents: Contents, target: str, chosen: Exporter) -> None:
    """CallError where PATH does not have what the target is made from."""
    if contents.dataset is not None and chosen.takes == "calls":
        usable = ", ".join(name for name in targets() if find_exporter(name).takes == "definitions")
        raise CallError(f"{contents.path}: a dataset has Definitions and no calls for {target}: --to one of {usable}")
    if contents.dataset is None and not contents.calls:
        raise CallError(f"{contents.path}: holds no calls")


def summary(loss: ExportLoss, output: Path) -> str:
    """What was exported and the greatest losses, in a few lines."""
    share = loss.exported / loss.total if loss.total else 1.0
    lines = [f"{output}: {loss.exported:,} of {loss.total:,} invocations ({share:.1%}) exported to {loss.target}"]
    lines += _reasons("lost", loss.lost, loss.total) + _reasons("reduced", loss.reduced, loss.total)
    return "\n".join(lines)


def _reasons(title: str, entries: list[Lost], total: int) -> list[str]:
    counts: dict[str, int] = {}
    for entry in entries:
        counts[entry.reason] = counts.get(entry.reason, 0) + entry.count
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"  {title}: {count:,} ({count / max(total, 1):.1%}) {reason}" for reason, count in ordered[:MOST_SHOWN]]
    more = len(ordered) - MOST_SHOWN
    return lines + ([f"  {title}: {more} more reasons in {loss_file.FILE}"] if more > 0 else [])

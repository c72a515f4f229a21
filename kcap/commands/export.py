"""`kcap export`: write what was recorded in another benchmark's format."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from kcap.bench.contents import CheckTarget, Contents, open_contents
from kcap.bench.exports import Exporter, ExportRequest, find_exporter, targets
from kcap.commands import given_options
from kcap.errors import DONE, PARTIAL, CallError
from kcap.schemas.flashinfer.agents import find_form, forms, turns_in
from kcap.schemas.results import export_loss as loss_file
from kcap.schemas.results import outcome
from kcap.schemas.results.export_loss import ExportLoss, LossLedger, Lost
from kcap.system.output import OutputKind, atomic_directory, check_output

EXPORT = OutputKind((loss_file.FILE,), "not made by kcap export, and is not replaced: choose another -o")
MOST_SHOWN, MOST_NAMED = 5, 3


@click.command(epilog="\b\nExample:\n  kcap export llama.kcap --to backendbench -o llama.backendbench")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--to", "target", type=click.Choice([*targets(), *forms()]), required=True, help="Whose format.")
@click.option("-o", "output", type=click.Path(path_type=Path), required=True, help="The folder to write.")
@click.option("--allow-truncated", is_flag=True, help="Export a Recording of fewer layers than the model has.")
@click.option("--measurements", type=click.Path(path_type=Path), help="Times for BackendBench: of kcap replay -o.")
@click.option(
    "--check/--no-check",
    default=True,
    help="Run each reference against the recorded operator, and on the random inputs that the target draws.",
)
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    help="Where to check. Default: as recorded; random inputs are tried on the CPU where there is no GPU.",
)
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
) -> int:
    """Write what was recorded in another benchmark's format, and what that format cannot carry.

    PATH is a Recording, a BackendBench trace file or parquet, or a FlashInfer-Bench dataset; for the form of an agent
    trace, a Recording of turns (kcap record --agent-trace) or a file in another such form. `loss.json` in the output
    tells in numbers what the target cannot carry. Exit code: 0 done; 3 written, but a reference differs from the
    operator that was recorded, or could not be run beside it, or not one turn could be written.
    """
    if target in forms():
        if options := given_options(("allow_truncated", "measurements", "check", "device", "trust")):
            raise CallError(f"{options}: --to {target} is made of turns alone: leave it out")
        return export_turns(path, target, output, force)
    chosen = find_exporter(target)
    checking = ("check", "device", "trust") if check else ("device", "trust")
    if chosen.takes != "definitions" and (options := given_options(checking)):
        raise CallError(f"{options}: --to {target} has no references that could be checked: leave it out")
    if measurements is not None and not chosen.takes_times:
        raise CallError(f"--measurements: {target} takes no times: leave it out")
    if measurements is not None and not measurements.is_file():
        raise CallError(f"{measurements}: no such file (kcap replay PATH -o {measurements} writes one)")
    contents = open_contents(path, allow_truncated)
    check_takes(contents, target, chosen)
    check_output(output, force, kind=EXPORT, sources=[path])
    with atomic_directory(output) as folder:
        loss = chosen.write(ExportRequest(contents, folder, measurements, check, CheckTarget(device, trust)))
        loss_file.write(folder / loss_file.FILE, loss)
    click.echo(summary(loss, output, "invocations"))
    disagreeing = disagreements(output)
    for line in disagreeing:
        click.echo(f"kcap: {line}", err=True)
    needs = f", {chosen.needs}" if chosen.needs else ""
    click.echo(f"Next{needs}: {chosen.following(output)}", err=True)
    return PARTIAL if disagreeing else DONE


def check_takes(contents: Contents, target: str, chosen: Exporter) -> None:
    """CallError where PATH does not have what the target is made from."""
    if contents.dataset is not None and chosen.takes != "definitions":
        usable = ", ".join(name for name in targets() if find_exporter(name).takes == "definitions")
        raise CallError(
            f"{contents.path}: a dataset has Definitions and no {chosen.takes} for {target}: --to one of {usable}"
        )
    if contents.dataset is None and not contents.calls:
        raise CallError(f"{contents.path}: holds no calls")


def export_turns(path: Path, target: str, output: Path, force: bool) -> int:
    """Write the turns of a Recording, or of a file in another form, and tell what was lost; 3: that is all of them."""
    trace, unread = turns_in(path)
    losses, form = LossLedger(), find_form(target)
    check_output(output, force, kind=EXPORT, sources=[path])
    with atomic_directory(output) as folder:
        for name, content in form.write(trace, losses).items():
            (folder / f"{name}{form.suffix}").write_bytes(content)
        loss = losses.loss(target, len(trace.turns))
        loss_file.write(folder / loss_file.FILE, loss)
    click.echo(summary(loss, output, "turns"))
    for what, count in unread.most_common(MOST_SHOWN):
        click.echo(f"  not read: {count:,} × {what}")
    return DONE if loss.exported or not loss.total else PARTIAL


def summary(loss: ExportLoss, output: Path, unit: str) -> str:
    """What was exported and the greatest losses, in a few lines."""
    share = loss.exported / loss.total if loss.total else 1.0
    lines = [f"{output}: {loss.exported:,} of {loss.total:,} {unit} ({share:.1%}) exported to {loss.target}"]
    lines += _reasons("lost", loss.lost, loss.total) + _reasons("reduced", loss.reduced, loss.total)
    return "\n".join(lines)


def disagreements(output: Path) -> list[str]:
    """A line for each Definition whose reference differs from the recorded operator, or failed; then where to look."""
    path = output / outcome.REFERENCE_CHECKS_FILE
    checks = list(outcome.read_reference_checks(path)) if path.is_file() else []
    by_definition: dict[str, list[outcome.ReferenceCheck]] = {}
    for check in checks:
        by_definition.setdefault(check.definition, []).append(check)
    lines = []
    for name, of_definition in by_definition.items():
        bad = [check for check in of_definition if check.status in ("differs", "failed")]
        if bad:
            worst = max(bad, key=lambda check: (check.status == "differs", check.error or 0.0))
            said = "differs from" if worst.status == "differs" else "could not be compared with"
            calls = f"{len(bad)} of the {len(of_definition)} calls tried"
            lines.append(f"{name}: the reference {said} {worst.operator} on {calls}: {worst.reason}")
    where = f"no Definition with such a reference is status:verified; {path} has each call"
    return [*lines, where] if lines else []


def _reasons(title: str, entries: list[Lost], total: int) -> list[str]:
    """A line for each reason, the greatest first; what it befell is named where it is one thing or a few."""
    counts: Counter[str] = Counter()
    operators: dict[str, list[str]] = {}
    for entry in entries:
        counts[entry.reason] += entry.count
        operators.setdefault(entry.reason, []).append(entry.operator)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    lines = [
        f"  {title}: {count:,} ({count / max(total, 1):.1%}) {reason}{_of(operators[reason])}"
        for reason, count in ordered[:MOST_SHOWN]
    ]
    more = len(ordered) - MOST_SHOWN
    return lines + ([f"  {title}: {more} more reasons in {loss_file.FILE}"] if more > 0 else [])


def _of(operators: list[str]) -> str:
    names = [name for name in operators if "::" in name]  # a turn has none
    return f" ({', '.join(names)})" if 0 < len(names) <= MOST_NAMED else ""

"""`kcap apply`: choose from what was judged what is put into the engine, and predict what that gains."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kcap.commands.gain import known_times
from kcap.errors import FAILED, CallError
from kcap.schemas.input_kind import detect_input
from kcap.schemas.recording.recording import Recording, load
from kcap.schemas.results.measurement import read_measurements
from kcap.schemas.results.plan import Plan, plan_bytes
from kcap.system.output import write_atomically

if TYPE_CHECKING:
    from rich.console import Console

    from kcap.bench.apply.choice import Judged

PATH = click.Path(path_type=Path)


@click.command(
    epilog="\b\nExample:\n  kcap apply llama.kcap --solutions judged --measurements llama.jsonl -o plan.json"
)
@click.argument("path", type=PATH)
@click.option("--solutions", type=PATH, required=True, metavar="JUDGED", help="The output of kcap bench PATH.")
@click.option(
    "--measurements",
    type=PATH,
    help="Times of the engine's kernels: of kcap replay PATH -o.  [default: the profiled steps of the Recording]",
)
@click.option("--solution", "names", multiple=True, metavar="NAME", help="Only Solutions of this name.")
@click.option("--slower", is_flag=True, help="Put in those that are slower than the engine's kernel, too.")
@click.option("-o", "output", type=PATH, required=True, metavar="PLAN", help="The plan to write: a JSON file.")
@click.option("--force", is_flag=True, help="Replace an existing plan.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan.")
def command(
    path: Path, solutions: Path, measurements: Path | None, names: tuple[str, ...], slower: bool, output: Path,
    force: bool, as_json: bool,
) -> int | None:  # fmt: skip
    """Choose the Solutions that are put into the engine, and for which of its calls.

    PATH is the Recording. A Solution is chosen where it PASSED for exactly the shapes, strides and scalars of a call,
    is faster there than the engine's own kernel, and the engine has a seam for it. The plan holds the Solutions, says
    what was left out and why, and what is gained by the judge's times. kcap run starts an engine with it, kcap ab
    measures what it gains there.
    """
    from kcap.bench.apply.choice import Wishes, make_plan, read_judged  # needs torch

    if detect_input(path) != "recording":
        raise CallError(f"{path} is no Recording: only one tells what an engine calls, and where")
    if output.exists() and not force:
        raise CallError(f"{output} exists: pass --force to replace it")
    recording = load(path)
    known = known_times(recording, measurements)
    if known is None:
        raise CallError(
            f"{path}: has no times, and a Solution must be faster than the engine's own kernels: "
            f"kcap replay {path} -o FILE measures them, for --measurements FILE"
        )
    judged = read_judged(solutions)
    note = check_comparable(recording, measurements, judged)
    plan = make_plan(recording, judged, known[0], Wishes(names, slower))
    write_atomically(output, plan_bytes(plan))
    if as_json:
        click.echo(plan_bytes(plan))
    else:
        print_plan(plan)
        if note:
            click.echo(f"kcap: {note}", err=True)
        if plan.replacements:
            model = shlex.quote(plan.model or "MODEL")
            click.echo(f"Next: kcap ab --plan {shlex.quote(str(output))} --model {model}", err=True)
    return None if plan.replacements else FAILED


def check_comparable(recording: Recording, measurements: Path | None, judged: Judged) -> str:
    """What makes the judge's times differ from those of the engine's kernels, or ""; CallError where they are of
    different machines."""
    from kcap.bench.run.summary.baseline import different_caches, why_not_comparable

    outcomes = [outcome for of_solution in judged.outcomes.values() for outcome in of_solution.values()]
    if measurements is None:
        device, devices = recording.metadata.device, judged.run.machine.devices
        if judged.run.device.startswith("cuda") and device and devices and device not in devices:
            raise CallError(
                f"{recording.path}: recorded on {device}, judged on {', '.join(devices)}: judge on {device}"
            )
        return ""
    lines = list(read_measurements(measurements))
    if (reason := why_not_comparable(lines, outcomes)) is not None:
        raise CallError(f"{measurements}: {reason}: measure (kcap replay) and judge on one machine")
    different = different_caches(lines, outcomes)
    remedy = " (kcap replay --cache)" if judged.run.device.startswith("cuda") else ""
    return f"{measurements}: {different}{remedy}" if different else ""


def print_plan(plan: Plan) -> None:
    """What is put in, what that gains by the judge's times, and what was left out."""
    from rich.text import Text

    from kcap.show.console import console, plain_table, print_table

    out = console()
    table = plain_table(["count", "engine us", "Solution us", "saved"], ["seam", "Solution", "call"])
    phases = [phase for phase in plan.total_us if plan.total_us[phase]]
    for one in plan.replacements:
        solution = plan.solutions[one.solution]
        saved = sum(one.call.counted(phase) * one.saved_us(phase) for phase in phases)
        table.add_row(
            f"{one.call.total:,}", " ".join(f"{us:.2f}" for us in dict.fromkeys(one.engine_us.values())),
            f"{one.solution_us:.2f}", f"{saved / max(sum(plan.total_us.values()), 1e-9):.1%}", one.seam,
            f"{solution.author}/{solution.name}", f"{one.call.operator} ({one.definition})",
        )  # fmt: skip
    if plan.replacements:
        print_table(out, table)
    _print_prediction(out, plan, phases)
    for left in plan.left_out:
        out.print(Text(left.text, "dim"))


def _print_prediction(out: Console, plan: Plan, phases: list[str]) -> None:
    from rich.text import Text

    if not plan.replacements:
        out.print(Text("nothing is put in", "bold"))
        return
    parts = [
        f"{plan.saved_us(phase) / plan.total_us[phase]:.1%} of {phase}"
        + (f" ({plan.saved_us(phase) / plan.steps[phase]:.1f} us a step)" if plan.steps.get(phase) else "")
        for phase in phases
    ]
    out.print(Text(f"\npredicted gain, of the time of all kernels: {', '.join(parts)}", "bold"))

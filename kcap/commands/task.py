"""`kcap task`: one Definition as a folder for whoever writes a kernel for it, a person or an agent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kcap.bench.tasks.forms import MARK, find_form, form_names
from kcap.errors import DONE, PARTIAL, CallError
from kcap.schemas.files.jsonfile import dump_json
from kcap.schemas.results.task import HELD_OUT_FILE, TASK_FILE
from kcap.system.machine import check_device
from kcap.system.output import OutputKind, atomic_directory, check_output, write_atomically

if TYPE_CHECKING:
    from kcap.bench.tasks.draft import TaskDraft

PATH = click.Path(path_type=Path)
POSITIVE = click.IntRange(min=1)
MARKERS = (TASK_FILE, f"tests/task/{TASK_FILE}", f"scripts/task/{TASK_FILE}", MARK)  # of the forms' folders
TASK = OutputKind(MARKERS, "not made by kcap task, and is not replaced: choose another -o")
HELD_OUT = OutputKind((HELD_OUT_FILE,), "not made by kcap task, and is not replaced: choose another --held-out-to")


@click.command()
@click.argument("path", type=PATH)
@click.option("--definition", metavar="NAME", help="Which Definition.  [default: list those that there are]")
@click.option("-o", "output", type=PATH, metavar="DIR", help="The folder to write.")
@click.option(
    "--form", type=click.Choice(form_names()), default="kcap", show_default=True, help="Whose form the folder has."
)
@click.option("--workloads", type=POSITIVE, metavar="N", help="Only the N most counted Workloads.")
@click.option("--measurements", type=PATH, help="Times of the engine's own kernels: of kcap replay PATH -o.")
@click.option("--held-out", type=click.IntRange(min=0), default=0, metavar="N", help="Keep back N of the Workloads.")
@click.option("--held-out-to", type=PATH, metavar="DIR", help="Where those go: a folder outside of the task's.")
@click.option("--device", help="cuda, cuda:N or cpu, to check the reference on.  [default: what it was recorded on]")
@click.option("--check/--no-check", default=True, help="Judge the example on one Workload, in the form kcap.")
@click.option("--force", is_flag=True, help="Replace the output.")
@click.option("--trust", is_flag=True, help="Run code of PATH that you did not record or export here yourself.")
def command(
    path: Path,
    definition: str | None,
    output: Path | None,
    form: str,
    workloads: int | None,
    measurements: Path | None,
    held_out: int,
    held_out_to: Path | None,
    device: str | None,
    check: bool,
    force: bool,
    trust: bool,
) -> int:
    """Write one Definition as a task: a folder that a person or an agent takes as it is.

    PATH is a Recording or a FlashInfer-Bench dataset. The folder says what to write, why it is worth it, what has to
    hold and how it is judged; it holds the reference, the engine's own kernel where its source was recorded, the
    Workloads with the engine's counts, and a Solution that passes. With --measurements it says how long the engine's
    kernel takes, how far that is from the machine's floor, and how much of a phase could be gained. Workloads that are
    kept back are judged last. Exit code: 0 done; 3 written, but the example does not pass here.

    \b
    Example:
      kcap task llama.kcap
      kcap replay llama.kcap -o llama.measurements.jsonl
      kcap task llama.kcap --definition rmsnorm_h4096 --measurements llama.measurements.jsonl -o task
      kcap judge task --quick
      kcap task llama.kcap --definition rmsnorm_h4096 --held-out 2 --held-out-to kept --form harbor -o harbor-task
    """
    from kcap.bench.tasks.draft import TaskRequest, draft_task  # needs torch

    check_device(device)
    if definition is None:
        return list_definitions(path, trust)
    if output is None:
        raise CallError("-o DIR is missing: the folder to write")
    if bool(held_out) is not bool(held_out_to):
        raise CallError("--held-out N and --held-out-to DIR go together: how many Workloads are kept back, and where")
    sources = [path, *([measurements] if measurements else [])]
    check_output(output, force, kind=TASK, sources=sources)
    if held_out_to is not None:
        check_output(held_out_to, force, kind=HELD_OUT, sources=sources)
        _check_apart(output, held_out_to)
    request = TaskRequest(path, definition, output, workloads, measurements, held_out, held_out_to, device, trust)
    draft = draft_task(request)
    chosen = find_form(form)
    with atomic_directory(output) as folder:
        chosen.write(draft, folder)
    if held_out_to is not None:
        with atomic_directory(held_out_to, private=True) as folder:
            draft.write_held_out(folder)
    click.echo(summary(draft, output))
    passes = not check or form != "kcap" or example_passes(output, device, trust)
    needs = f", {chosen.needs}" if chosen.needs else ""
    click.echo(f"Next{needs}: {chosen.following(output)}", err=True)
    return DONE if passes else PARTIAL


def list_definitions(path: Path, trust: bool) -> int:
    from kcap.bench.tasks.draft import definition_rows
    from kcap.show.console import console, plain_table, print_table

    table = plain_table(("invocations", "workloads"), ("op_type", "definition"))
    for name, op_type, workloads, count in definition_rows(path, trust):
        table.add_row(f"{count:,}", f"{workloads:,}", op_type, name)
    print_table(console(), table)
    click.echo(f"Next: kcap task {path} --definition NAME -o task", err=True)
    return DONE


def _check_apart(output: Path, held_out_to: Path) -> None:
    given_away, kept = output.resolve(), held_out_to.resolve()
    if given_away.is_relative_to(kept) or kept.is_relative_to(given_away):
        raise CallError(f"--held-out-to {held_out_to}: has to lie outside of {output}, which is given away")


def summary(draft: TaskDraft, output: Path) -> str:
    from kcap.replay.calls.report import duration
    from kcap.schemas.recording.phases import ALL_PHASES

    task = draft.task
    held_out = f", {task.held_out.workloads} kept back" if task.held_out else ""
    lines = [f"{output}: {task.definition}, {len(task.workloads)} Workloads{held_out}"]
    if room := task.room.get(ALL_PHASES):
        share = f" ({room.share:.1%} of all that was measured)" if room.share is not None else ""
        least = duration(room.engine_us - room.floor_us)
        lines.append(f"  {duration(room.engine_us)} in the engine; at most {least} can be gained{share}")
    return "\n".join([*lines, *(f"  {note}" for note in task.notes)])


def example_passes(output: Path, device: str | None, trust: bool) -> bool:
    """Whether the example passes on the most counted Workload; where it does not, that is said."""
    from kcap.bench.run.options import JudgeOptions
    from kcap.bench.tasks.folder import find_solution, open_task
    from kcap.bench.tasks.warm_judge import WarmJudge

    opened = open_task(output, trust)
    with WarmJudge(opened, JudgeOptions(device=device, seconds=0.03)) as judge:
        verdict = judge.verdict(find_solution(opened, output), quick=True)
    task = opened.task.model_copy(update={"example": verdict.status})
    write_atomically(output / TASK_FILE, dump_json(task.model_dump(mode="json")))
    if verdict.status == "PASSED":
        return True
    click.echo(f"kcap: the example does not pass here: {verdict.status}: {verdict.reason}", err=True)
    return False

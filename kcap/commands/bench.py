"""`kcap bench`: judge Solutions, each in a process of its own, on the Workloads of a Recording or a dataset."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
import orjson

from kcap.bench.contents import CheckTarget
from kcap.bench.executors import executors, find_executor
from kcap.bench.executors.local import choose_device
from kcap.bench.run import foreign_formats
from kcap.bench.run import output as runs
from kcap.bench.run.bench_run import BenchRun, choose_workloads
from kcap.bench.run.options import Options
from kcap.bench.run.output import check_output, owned
from kcap.bench.run.subject import PreparedDataset, Subject, open_subject
from kcap.bench.solutions import read_solutions
from kcap.bench.summary import report
from kcap.bench.summary.summary import Summary, summarize
from kcap.errors import DONE, FAILED, PARTIAL, CallError
from kcap.replay.calls.report import console
from kcap.replay.datasets.workloads import workload_weights
from kcap.schemas.results.outcome import Outcome
from kcap.show.progress import progress

POSITIVE = click.IntRange(min=1)
SECONDS = click.FloatRange(min=0.1)
PATH = click.Path(path_type=Path)


@click.command()
@click.argument("path", type=PATH)
@click.option("--solutions", type=PATH, required=True, metavar="DIR", help="The Solutions: a folder of JSON or .py.")
@click.option("-o", "output", type=PATH, required=True, metavar="DIR", help="The folder to write.")
@click.option("--definition", metavar="NAME", help="The Definition of .py files that name none.")
@click.option("--op", "globs", multiple=True, metavar="GLOB", help="Only Definitions that match.")
@click.option("--workloads", type=POSITIVE, metavar="N", help="Only the N most counted of each Definition.")
@click.option("--device", help="cuda (all GPUs), cuda:N or cpu.  [default: what it was recorded on, or a GPU]")
@click.option("--seconds", type=click.FloatRange(min=0.001), default=0.1, show_default=True, help="Sampling of each.")
@click.option("--timeout", type=SECONDS, default=60, show_default=True, help="Seconds on a Workload at most.")
@click.option("--build-timeout", type=SECONDS, default=300, show_default=True, help="Seconds of a build at most.")
@click.option("--memory", type=click.FloatRange(min=0.1), metavar="GIB", help="Host memory of a Solution at most.")
@click.option("--threads", type=POSITIVE, help="CPU threads of a Solution.  [default: all cores but one]")
@click.option("--executor", type=click.Choice(executors()), default="local", show_default=True, help="What judges.")
@click.option("--measurements", type=PATH, help="Times of the engine's own kernels: of kcap replay PATH -o.")
@click.option("--resume", is_flag=True, help="Keep what the output has, and judge the rest.")
@click.option("--force", is_flag=True, help="Replace the output.")
@click.option("--trust", is_flag=True, help="Run code of PATH that you did not record here yourself.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool, **given: Any) -> int:
    """Judge Solutions: whether they compute what they must, how fast, and what that saves.

    PATH is a Recording or a FlashInfer-Bench dataset; a dataset's references are code from elsewhere, which runs only
    with --trust. Each Solution runs in a process of its own, confined as far as the machine can. The output holds
    outcomes.jsonl (a line as soon as it is there), bench.json, and the same as FlashInfer-Bench's traces/ and as
    results/. Exit code: 0 all were judged, whatever they are worth; 1 none could be; 3 some could not, or a file was
    refused.

    \b
    Example:
      kcap replay llama.kcap -o llama.measurements.jsonl
      kcap bench llama.kcap --solutions my_kernels -o judged --measurements llama.measurements.jsonl
      kcap bench llama.kcap --solutions my_kernels -o judged --resume
    """
    options = Options(**given)
    judging = prepare(options)
    with owned(options.output, options.force):
        try:
            summary = judge(judging)
        except KeyboardInterrupt:
            click.echo(f"what was judged is kept: the same command with --resume finishes {options.output}", err=True)
            raise
    tell(options, summary, as_json)
    return exit_code(summary, len(judging.found))


def prepare(options: Options) -> BenchRun:
    """Read everything that there is to judge, and write nothing; CallError where the call cannot work."""
    check_output(options.output, [options.path, options.solutions], options.resume, options.force)
    if options.measurements is not None and not options.measurements.is_file():
        raise CallError(f"{options.measurements}: no such file (kcap replay PATH -o {options.measurements} writes one)")
    subject = open_subject(options.path, options.trust)
    check_definition(subject, options.definition)
    found, refused = read_solutions(options.solutions, subject.definitions, options.definition)
    taken = options.choice.takes
    found = [one for one in found if taken(one.solution.definition)]
    refused = [one for one in refused if one.definition not in subject.definitions or taken(one.definition or "")]
    if not found and not refused:
        raise CallError(f"{options.solutions}: no Solution of a Definition that matches --op")
    device = choose_device(options.device, subject.home)
    find_executor(options.executor).check(device, options.threads)
    weights = workload_weights(subject.counts)
    return BenchRun(
        options, subject, found, refused, choose_workloads(subject, weights, options.workloads), weights, device
    )


def check_definition(subject: Subject, name: str | None) -> None:
    if name is not None and name not in subject.definitions:
        near = ", ".join(get_close_matches(name, subject.definitions, cutoff=0.4)) or "none like it"
        raise CallError(f"--definition {name}: {subject.path} has no such Definition ({near})")


def judge(judging: BenchRun) -> Summary:
    """Judge what is left, and write what all Outcomes come to."""
    run, kept = judging.begin()
    if kept.torn:
        click.echo("the last line of outcomes.jsonl had broken off: it is judged again", err=True)
    units = judging.units(kept.outcomes)
    outcomes = list(kept.outcomes)
    with progress() as bar:
        task = bar.add_task("bench", total=sum(len(unit.workloads) for unit in units))
        if units:
            bar.update(task, description="checking references")
        prepared = _prepared(judging, {unit.definition.name for unit in units})
        with closing(judging.judge(run, units, prepared)) as judged:
            for outcome in judged:
                outcomes.append(outcome)
                bar.update(task, advance=1, description=f"{outcome.definition} {outcome.solution}"[:40])
    write(judging, outcomes)
    return summarize(judging, outcomes, runs.read_run(judging.options.output).machine)


def _prepared(judging: BenchRun, names: set[str]) -> PreparedDataset:
    on = CheckTarget(judging.device, judging.options.trust)
    return judging.subject.prepare(names, judging.options.output, on)


def write(judging: BenchRun, outcomes: Iterable[Outcome]) -> None:
    """The Outcomes in the formats of others."""
    output, subject = judging.options.output, judging.subject
    ordered = sorted(outcomes, key=lambda one: (one.definition, one.author, one.solution, one.workload))
    foreign_formats.write_traces(output, ordered, subject.definitions, subject.workloads)
    foreign_formats.write_benchmark_results(output, ordered)


def tell(options: Options, summary: Summary, as_json: bool) -> None:
    if as_json:
        told = {"path": str(options.path), "output": str(options.output), **summary.as_json()}
        click.echo(orjson.dumps(told, option=orjson.OPT_INDENT_2))
        return
    report.print_summary(console(), summary)
    click.echo(f"\nOutcomes: {options.output}/outcomes.jsonl", err=True)
    if options.measurements is None:
        trust, name = " --trust" if options.trust else "", options.path.resolve().stem
        words = f"kcap replay {options.path}{trust} -o {name}.measurements.jsonl"
        click.echo(f"Next: {words} (for --measurements: what share of the whole is saved)", err=True)


def exit_code(summary: Summary, solutions: int) -> int:
    """`solutions`: how many there are. One whose Definition has no Workloads has no Score."""
    if not any(score.judged for score in summary.scores):
        return FAILED
    whole = all(score.judged == len(score.workloads) for score in summary.scores) and len(summary.scores) == solutions
    return DONE if whole and not summary.refused else PARTIAL

"""`kcap bench`: judge Solutions, each in a process of its own, on the Workloads of a Recording or a dataset."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import orjson

from kcap.bench.run.executors import executors
from kcap.bench.run.options import Options
from kcap.bench.run.output import owned, read_run
from kcap.commands import GIBIBYTES, LIMIT, SAMPLING, THREADS
from kcap.errors import DONE, FAILED, PARTIAL
from kcap.system.machine import processors_in_use

if TYPE_CHECKING:
    from kcap.bench.run.summary.summary import Summary

POSITIVE = click.IntRange(min=1)
PATH = click.Path(path_type=Path)


@click.command()
@click.argument("path", type=PATH)
@click.option("--solutions", type=PATH, required=True, metavar="DIR", help="The Solutions: a folder of JSON or .py.")
@click.option("-o", "output", type=PATH, required=True, metavar="DIR", help="The folder to write.")
@click.option("--definition", metavar="NAME", help="The Definition of .py files that name none.")
@click.option("--op", "globs", multiple=True, metavar="GLOB", help="Only Definitions that match.")
@click.option("--workloads", type=POSITIVE, metavar="N", help="Only the N most counted of each Definition.")
@click.option("--device", help="cuda (all GPUs), cuda:N or cpu.  [default: what it was recorded on, or a GPU]")
@click.option("--seconds", type=SAMPLING, default=0.1, show_default=True, help="Sampling of each.")
@click.option("--timeout", type=LIMIT, default=60, show_default=True, help="Seconds on a Workload at most.")
@click.option(
    "--build-timeout",
    type=LIMIT,
    default=300,
    show_default=True,
    help="Of a build, and of a first run: it may compile.",
)
@click.option("--memory", type=GIBIBYTES, metavar="GIB", help="Host memory of a Solution at most.")
@click.option(
    "--threads",
    type=THREADS,
    help="CPU threads of a Solution.  [default: those of --measurements, else all cores but one]",
)
@click.option("--executor", type=click.Choice(executors()), default="local", show_default=True, help="What judges.")
@click.option("--measurements", type=PATH, help="Times of the engine's own kernels: of kcap replay PATH -o.")
@click.option("--resume", is_flag=True, help="Keep what the output has, and judge the rest.")
@click.option("--force", is_flag=True, help="Replace the output.")
@click.option("--trust", is_flag=True, help="Run code of PATH that you did not record or export here yourself.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool, **settings: Any) -> int:
    """Judge Solutions: whether they compute what they must, how fast, and what that saves.

    PATH is a Recording or a FlashInfer-Bench dataset; a dataset's references are code, which runs only with --trust,
    unless you exported it here yourself. Each Solution runs in a process of its own, confined as far as the machine
    can. The output holds outcomes.jsonl (a line as soon as it is there), bench.json, and the same as FlashInfer-Bench's
    traces/ and as results/. Exit code: 0 all were judged, whatever they are worth; 1 none could be; 3 some could not,
    or a file was refused.

    \b
    Example:
      kcap replay llama.kcap -o llama.measurements.jsonl
      kcap bench llama.kcap --solutions my_kernels -o judged --measurements llama.measurements.jsonl
      kcap bench llama.kcap --solutions my_kernels -o judged --resume
    """
    from kcap.bench.run.bench_run import judge_remaining, open_run  # needs torch
    from kcap.bench.run.summary.summary import summarize

    options = Options(**settings)
    bench_run, before = open_run(options), processors_in_use()
    with owned(options.output, options.force):
        try:
            outcomes = judge_remaining(bench_run)
        except KeyboardInterrupt:
            click.echo(f"what was judged is kept: the same command with --resume finishes {options.output}", err=True)
            raise
        summary = summarize(bench_run, outcomes, read_run(options.output).machine, (before, processors_in_use()))
    print_summary(options, summary, as_json)
    return exit_code(summary, len(bench_run.solutions))


def print_summary(options: Options, summary: Summary, as_json: bool) -> None:
    from kcap.bench.run.summary import report
    from kcap.show.console import console

    if as_json:
        fields = {"path": str(options.path), "output": str(options.output), **summary.as_json()}
        click.echo(orjson.dumps(fields, option=orjson.OPT_INDENT_2))
        return
    report.print_summary(console(), summary)
    click.echo(f"\nOutcomes: {options.output}/outcomes.jsonl", err=True)
    if options.measurements is None:
        click.echo("For the share of the whole, pass --measurements with the file that this writes:", err=True)
        click.echo(f"Next: {replay_command(options, summary)}", err=True)


def replay_command(options: Options, summary: Summary) -> str:
    """The command that measures the engine's own kernels as the Solutions were."""
    threads = {outcome.threads for score in summary.scores for outcome in score.outcomes.values()} - {None}
    words = ["kcap", "replay", str(options.path), *(["--trust"] if options.trust else [])]
    words += ["--threads", str(threads.pop())] if len(threads) == 1 else []
    return shlex.join([*words, "-o", f"{options.path.resolve().stem}.measurements.jsonl"])


def exit_code(summary: Summary, solutions: int) -> int:
    """`solutions`: how many there are. One whose Definition has no Workloads has no Score."""
    if not any(score.judged for score in summary.scores):
        return FAILED
    whole = all(score.judged == len(score.workloads) for score in summary.scores) and len(summary.scores) == solutions
    return DONE if whole and not summary.refused else PARTIAL

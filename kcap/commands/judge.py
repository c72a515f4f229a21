"""`kcap judge`: one Solution of a task, judged in seconds: is it right, how fast is it, what does it gain."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import orjson

from kcap.commands import GIBIBYTES, LIMIT, SAMPLING, THREADS
from kcap.errors import DONE, FAILED, PARTIAL, CallError

if TYPE_CHECKING:
    from kcap.bench.tasks.folder import OpenTask
    from kcap.bench.tasks.warm_judge import WarmJudge
    from kcap.schemas.results.verdict import Verdict, WorkloadVerdict

PATH = click.Path(path_type=Path)
QUICK_SECONDS = 0.03
FailOn = Literal["never", "wrong", "slower"]


@dataclass(frozen=True)
class Request:
    """What `kcap judge` was asked for, the judge's own options apart."""

    path: Path
    task: Path | None
    held_out: Path | None
    quick: bool
    as_json: bool
    fail_on: FailOn
    reward: Path | None
    profile: bool
    trust: bool


def print_schema(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from kcap.schemas.json_schema import json_schema

    click.echo(orjson.dumps(json_schema("verdict"), option=orjson.OPT_INDENT_2))
    context.exit()


@click.command()
@click.argument("path", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as --schema describes it.")
@click.option("--quick", is_flag=True, help="Judge on the most counted Workload alone.")
@click.option("--task", type=PATH, metavar="DIR", help="The task.  [default: the folder that PATH is or lies in]")
@click.option(
    "--held-out", type=PATH, metavar="DIR", help="Where the held-out Workloads are, if not where they were put."
)
@click.option(
    "--fail-on",
    type=click.Choice(["never", "wrong", "slower"]),
    default="wrong",
    show_default=True,
    help="What exit code 1 says: it does not pass, or it does and gains nothing either.",
)
@click.option("--reward", type=PATH, metavar="FILE", help='Write {"reward": …} there: the speedup, 0 unless it passed.')
@click.option("--profile", is_flag=True, help="Add the counters of Nsight Compute; this runs it outside the sandbox.")
@click.option("--serve", is_flag=True, help="Stay warm: take requests from standard input, a JSON object a line.")
@click.option("--mcp", is_flag=True, help="The same as an MCP server (pip install 'kcap[mcp]').")
@click.option("--device", help="cuda:N or cpu.  [default: what it was recorded on, or a GPU]")
@click.option("--seconds", type=SAMPLING, help="Sampling of each Workload.  [default: 0.1; --quick: 0.03]")
@click.option("--timeout", type=LIMIT, default=60, show_default=True, help="Seconds on a Workload at most.")
@click.option(
    "--build-timeout",
    type=LIMIT,
    default=300,
    show_default=True,
    help="Of a build, and of a first run: it may compile.",
)
@click.option("--memory", type=GIBIBYTES, metavar="GIB", help="Host memory of the Solution at most.")
@click.option("--threads", type=THREADS, help="CPU threads.  [default: those of the engine's times]")
@click.option("--trust", is_flag=True, help="Run references that you did not record or export here yourself.")
@click.option(
    "--schema", is_flag=True, is_eager=True, expose_value=False, callback=print_schema, help="Print the JSON Schema."
)
def command(
    path: Path,
    as_json: bool,
    quick: bool,
    task: Path | None,
    held_out: Path | None,
    fail_on: FailOn,
    reward: Path | None,
    profile: bool,
    serve: bool,
    mcp: bool,
    trust: bool,
    **options: Any,
) -> int:
    """Judge one Solution of a task, as kcap bench does: whether it is right, how fast it is, what it gains.

    PATH is a task's folder, whose solution/ is judged, or a Solution's file. The most counted Workload comes first, and
    each is told as soon as it is judged. What fails comes with the compiler's text and line, or with the worst element,
    how many are wrong and where; what passes with its time beside the engine's kernel and the machine's floor. Exit
    code: 0 judged; 1 by --fail-on, or nothing could be judged; 2 the call was wrong; 3 some could not be judged.

    \b
    Example:
      kcap judge task --quick
      kcap judge task/solution/solution.py --json
      kcap judge mine.py --task task --fail-on slower
    """
    from kcap.bench.run.options import JudgeOptions
    from kcap.bench.tasks.folder import find_task, open_task  # needs torch
    from kcap.bench.tasks.warm_judge import WarmJudge

    if serve and mcp:
        raise CallError("--serve and --mcp are two ways to ask: pass one of them")
    request = Request(path, task, held_out, quick, as_json, fail_on, reward, profile, trust)
    opened = open_task(find_task(task or path), trust, held_out)
    seconds = options.pop("seconds") or (QUICK_SECONDS if quick else 0.1)
    judge_options = JudgeOptions(seconds=seconds, **options)
    if mcp:
        from kcap.bench.tasks.mcp_server import run_server

        run_server(opened, judge_options)
        return DONE
    if serve:
        return _serve(opened, WarmJudge(opened, judge_options))
    return _judge(request, opened, WarmJudge(opened, judge_options))


def _judge(request: Request, opened: OpenTask, warm: WarmJudge) -> int:
    from kcap.bench.solutions import FoundSolution, RefusedSolution
    from kcap.bench.tasks.folder import find_solution

    solution_file = find_solution(opened, request.path)
    with nullcontext(warm) if isinstance(solution_file, RefusedSolution) else warm as judge:
        verdict = judge.verdict(solution_file, request.quick, _ignore if request.as_json else _echo_workload)
    if request.profile and isinstance(solution_file, FoundSolution):
        from kcap.bench.tasks.profiler import with_profile

        verdict = with_profile(verdict, opened, solution_file)
    if request.as_json:
        click.echo(orjson.dumps(verdict.model_dump(mode="json"), option=orjson.OPT_INDENT_2))
    else:
        _print(verdict)
    if request.reward is not None:
        request.reward.write_bytes(orjson.dumps({"reward": reward_of(verdict)}) + b"\n")
    return exit_code(verdict, request.fail_on)


def _ignore(_: WorkloadVerdict) -> None: ...


def _echo_workload(workload: WorkloadVerdict) -> None:
    """A line on standard error as soon as a Workload is judged."""
    from kcap.bench.tasks.report import sizes_of
    from kcap.schemas.validation.report import printable

    took = f" {workload.time.median_us:.2f} µs" if workload.time else ""
    speedup = f", {workload.speedup:.2f}x" if workload.speedup else ""
    click.echo(printable(f"{workload.status} at {sizes_of(workload)}{took}{speedup}"), err=True)


def _print(verdict: Verdict) -> None:
    from kcap.bench.tasks.report import print_verdict
    from kcap.show.console import console

    print_verdict(console(), verdict)


def _serve(opened: OpenTask, warm: WarmJudge) -> int:
    """Answers alone go to standard output: whatever else would be printed there goes to standard error."""
    from kcap.bench.tasks.serve import serve

    with os.fdopen(os.dup(1), "wb", buffering=0) as answers:
        os.dup2(2, 1)
        with warm as judge:
            serve(judge, sys.stdin.buffer, lambda message: answers.write(orjson.dumps(message) + b"\n"))
    return DONE


def reward_of(verdict: Verdict) -> float:
    """How many times as fast as the baseline it is, weighted by the engine's counts; 0 unless everything passed."""
    gain = verdict.gain.get("all")
    return gain.speedup if verdict.status == "PASSED" and gain is not None and gain.speedup is not None else 0.0


def exit_code(verdict: Verdict, fail_on: FailOn) -> int:
    statuses = [workload.status for workload in verdict.workloads]
    if statuses and all(status == "NOT_JUDGED" for status in statuses):
        return FAILED
    wrong = verdict.status not in ("PASSED", "NOT_JUDGED")
    if fail_on != "never" and wrong:
        return FAILED
    if fail_on == "slower" and verdict.status == "PASSED" and reward_of(verdict) <= 1:
        return FAILED
    return PARTIAL if "NOT_JUDGED" in (verdict.status, *statuses) else DONE

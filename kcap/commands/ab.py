"""`kcap ab`: what the Solutions of a plan gain in the engine, measured."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import orjson

from kcap.commands.record import offline_options
from kcap.commands.run import check_engine_choice, given_client, problems, start_engine, temporary_folder, told, tried
from kcap.errors import FAILED, KcapError

if TYPE_CHECKING:
    from kcap.bench.apply.arms import TimedStep
    from kcap.bench.apply.comparison import Compared, Difference
    from kcap.bench.apply.process import Engagement
    from kcap.bench.apply.quality import Quality, QualityCheck
    from kcap.schemas.results.plan import Plan

EXAMPLE = """
\b
Examples:
  kcap ab --plan plan.json --model meta-llama/Llama-3.1-8B --load-format dummy --num-prompts 16 --output-len 512
  kcap ab --plan plan.json --client "vllm bench serve --model Qwen/Qwen3-8B" -- vllm serve Qwen/Qwen3-8B
"""
COMPARED = 8  # steps whose logits are compared
PATH = click.Path(path_type=Path)


@click.command(epilog=EXAMPLE, context_settings={"allow_interspersed_args": False})
@click.option("--plan", "plan_file", required=True, type=PATH, help="What goes into the engine: of kcap apply.")
@click.option("--block", default=8, show_default=True, type=click.IntRange(2), help="Steps of a block.")
@click.option("--trial/--no-trial", default=True, show_default=True, help="Try each Solution alone first.")
@click.option("--pairs", type=click.IntRange(1), help="Also start so many pairs of fresh engines, and compare those.")
@click.option("--trust", is_flag=True, help="Run kernel sources of a Recording that you did not make here yourself.")
@offline_options
@click.option("--client", help="The load of the server COMMAND.")
@click.option("--ready", metavar="URL", help="What answers once the server serves (told from a usual COMMAND).")
@click.option(
    "--ready-timeout", default=600.0, show_default=True, type=click.FloatRange(0), help="Seconds until it must."
)
@click.option("--engine-log", type=PATH, help="Keep what the engine of --model, or the server, prints.")
@click.option("-o", "output", type=PATH, help="Write what was measured as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("command_line", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(
    plan_file: Path, block: int, trial: bool, trust: bool, pairs: int | None, client: str | None, ready: str | None,
    ready_timeout: float, engine_log: Path | None, output: Path | None, as_json: bool, command_line: tuple[str, ...],
    **offline: Any,
) -> int | None:  # fmt: skip
    """Measure what the Solutions of a plan gain in the engine, beside what kcap bench predicts.

    One engine runs its steps in blocks: with its own kernels, with the Solutions, and with its own once more as a
    control, in random order; where it captures CUDA graphs, each of the three has a set of its own. Told are the paired
    differences of step times with their 95 % intervals, by phase and number of sequences. With --pairs the same load is
    also given to fresh engines, alternating without and with the plan.
    """
    from kcap.bench.apply import arms
    from kcap.bench.apply.comparison import compare
    from kcap.bench.apply.process import session_options
    from kcap.bench.apply.quality import Quality, read_checks
    from kcap.schemas.results.plan import read_plan

    plan = read_plan(plan_file)
    check_engine_choice(offline["model"], command_line)
    load = given_client(client, ready, ready_timeout, command_line)
    if trial:
        plan = tried(plan, trust)

    checks: list[QualityCheck] = []

    def run(**extension: Any) -> tuple[list[TimedStep], list[Engagement]]:
        with temporary_folder("kcap-ab-") as left, told(plan, left, False) as engagements:
            options = session_options(plan, left, arms.WINDOW, **extension)
            started = start_engine(options, left, offline, command_line, load, engine_log)
            if started.failure:
                raise KcapError(started.failure)
            steps = list(arms.read_steps(left))
            checks.extend(read_checks(left))
        return steps, engagements

    steps, engagements = run(block=block, seed=secrets.randbits(31), compared=COMPARED)
    quality = Quality.of(check for check in checks if check.rank == min(one.rank for one in checks))
    compared = compare(plan, [step for step in steps if step.rank == min(s.rank for s in steps)], block)
    fresh = [(arm, run(arm=arm)[0]) for arm in fresh_order(pairs or 0)]
    document = as_document(plan, compared, engagements, quality, fresh)
    if output is not None:
        output.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    if as_json:
        click.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    else:
        print_comparison(plan, compared, engagements, quality, document["fresh"])
    return None if any(one.held for one in compared) else FAILED


def fresh_order(pairs: int) -> list[str]:
    """The arms of fresh engines: pairs, each begun by the other arm than the one before."""
    return [arm for pair in range(pairs) for arm in (("engine", "solutions"), ("solutions", "engine"))[pair % 2]]


def as_document(
    plan: Plan, compared: Sequence[Compared], engagements: Sequence[Engagement], quality: Quality | None,
    fresh: Sequence[tuple[str, Sequence[TimedStep]]],
) -> dict[str, Any]:  # fmt: skip
    """What was measured, for programs. `fresh`: the steps of each fresh engine, in their order."""
    return {
        "format": "1.0",
        "solutions": {f"{s.author}/{s.name}": sha256 for sha256, s in plan.solutions.items()},
        "compared": [one.as_json() for one in compared],
        "engagement": [one.model_dump(mode="json") for one in engagements],
        "quality": None
        if quality is None
        else {
            "solutions": quality.solutions.model_dump(mode="json"),
            "control": quality.control.model_dump(mode="json"),
        },
        "problems": problems(plan, engagements),
        "fresh": _fresh_as_json(fresh),
    }


def _fresh_as_json(fresh: Sequence[tuple[str, Sequence[TimedStep]]]) -> dict[str, Any]:
    from statistics import fmean, median

    from kcap.bench.apply.comparison import half_interval

    if not fresh:
        return {}
    us = [(arm, fmean(step.us for step in steps if step.phase == "decode")) for arm, steps in fresh]
    pairs = [dict(us[at : at + 2]) for at in range(0, len(us), 2)]
    ratios = [pair["solutions"] / pair["engine"] for pair in pairs]
    return {
        "decode_us": [list(one) for one in us],
        "median_ratio": median(ratios),
        "half_interval": half_interval(ratios),
    }


def print_comparison(
    plan: Plan, compared: Sequence[Compared], engagements: Sequence[Engagement], quality: Quality | None,
    fresh: Mapping[str, Any],
) -> None:  # fmt: skip
    """A row for each kind of step, and what else must be known."""
    from rich.text import Text

    from kcap.show.console import console, plain_table, print_table

    out = console()
    columns = ["sequences", "steps", "engine us", "Solutions", "control", "predicted", "held"]
    table = plain_table(columns, ["phase"])
    for one in compared:
        table.add_row(
            f"{one.sequences:,}", f"{sum(one.steps.values()):,}", f"{one.us:,.1f}", _in_percent(one.solutions, one.us),
            _in_percent(one.control, one.us), f"{one.predicted_us / one.us:+.2%}" if one.held else "–",
            f"{one.held:.0%}", one.phase,
        )  # fmt: skip
    print_table(out, table)
    if not any(one.held for one in compared):
        out.print(Text("no Solution ran in any step: nothing was measured of them", "bold"))
    out.print(_quality_text(quality))
    if fresh:
        half = fresh["half_interval"]
        interval = "" if half is None else f" ± {half:.2%}"
        out.print(
            f"fresh engines, {len(fresh['decode_us']) // 2} pairs: "
            f"decode {fresh['median_ratio'] - 1:+.2%}{interval} (median of pairs)"
        )
    for line in problems(plan, engagements):
        out.print(Text(line, "bold"))
    out.print(Text("change of a step's time, with the 95 % interval of the paired differences; less is faster", "dim"))


def _quality_text(quality: Quality | None) -> str:
    if quality is None:
        return "logits: not compared (kcap cannot run a forward of this engine twice)"
    parts = [
        f"{name}: the same top token for {of.top1:.1%}, KL {of.kl:.2g}, rms of the difference {of.rms:.2g}"
        for name, of in (("Solutions", quality.solutions), ("control", quality.control))
    ]
    return f"logits of {quality.solutions.tokens:,} tokens against the engine's own: {'; '.join(parts)}"


def _in_percent(difference: Difference | None, us: float) -> str:
    if difference is None:
        return "–"
    half = "" if difference.half is None else f" ± {difference.half / us:.2%}"
    return f"{difference.us / us:+.2%}{half}"

"""`kcap ab`: what the Solutions of a plan gain in the engine, measured."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeVar

import click
import orjson

from kcap.commands.record import check_engine_choice, engine_options
from kcap.commands.run import (
    given_client,
    print_quality,
    problems,
    read_plan_for_engine,
    start_engine,
    temporary_folder,
    told,
    tried,
)
from kcap.errors import FAILED, CallError, KcapError
from kcap.schemas.results.applied import (
    CONTROL,
    Applied,
    Difference,
    Engagement,
    FreshEngines,
    PlanCompared,
    applied_bytes,
)
from kcap.version import __version__

if TYPE_CHECKING:
    from kcap.bench.apply.arms import TimedStep
    from kcap.bench.apply.quality import QualityCheck

EXAMPLE = """
\b
Examples:
  kcap ab --plan plan.json --model meta-llama/Llama-3.1-8B --load-format dummy --num-prompts 16 --output-len 512
  kcap ab --plan plan.json --client "vllm bench serve --model Qwen/Qwen3-8B" -- vllm serve Qwen/Qwen3-8B
"""
COMPARED = 8  # steps whose logits are compared
PATH = click.Path(path_type=Path)
Line = TypeVar("Line", "TimedStep", "QualityCheck")


@click.command(epilog=EXAMPLE, context_settings={"allow_interspersed_args": False})
@click.option(
    "--plan", "plan_files", required=True, multiple=True, type=PATH, help="What is compared: of kcap apply; several."
)
@click.option("--block", default=8, show_default=True, type=click.IntRange(2), help="Steps of a block.")
@click.option(
    "--trial/--no-trial", default=True, show_default=True, help="Try each Solution alone first, on the Recording."
)
@click.option("--pairs", type=click.IntRange(1), help="Also start so many pairs of fresh engines, and compare those.")
@click.option("--slower", is_flag=True, help="Put in those that turn out slower alone, too.")
@click.option("--trust", is_flag=True, help="Run kernel sources of a Recording that you did not make here yourself.")
@engine_options
@click.option("--client", help="The load of the server COMMAND.")
@click.option("-o", "output", type=PATH, help="Write (or overwrite) what was measured as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("command_line", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(
    plan_files: tuple[Path, ...], block: int, trial: bool, slower: bool, trust: bool, pairs: int | None,
    client: str | None, ready: str | None, ready_timeout: float, engine_log: Path | None, output: Path | None,
    as_json: bool, command_line: tuple[str, ...], **offline: Any,
) -> int | None:  # fmt: skip
    """Measure what the Solutions of a plan gain in the engine, beside what kcap bench predicts.

    One engine runs its steps in blocks, in random order: with its own kernels, with these once more as a control, and
    with each plan; where it captures CUDA graphs, each of them has a set of its own. Told are the paired differences of
    step times with their 95 % intervals, by phase and number of sequences. With --pairs the same load is also given to
    fresh engines, alternating without and with the (only) plan.
    """
    from kcap.bench.apply import arms
    from kcap.bench.apply.comparison import compare
    from kcap.bench.apply.process import session_options
    from kcap.bench.apply.quality import quality_of, read_checks

    plans = [read_plan_for_engine(file) for file in plan_files]
    check_engine_choice(offline["model"], command_line)
    if pairs and len(plans) > 1:
        raise CallError("--pairs starts fresh engines with one plan: give one --plan")
    load = given_client(client, ready, ready_timeout, command_line)
    if trial:
        plans = [tried(plan, trust, slower) for plan in plans]
    schedule = arms.Schedule(len(plans), block, secrets.randbits(31))

    def run(**extension: Any) -> Measured:
        with temporary_folder("kcap-ab-") as left, told(plans, left, False) as engagements:
            options = session_options(plans, left, arms.WINDOW, **extension)
            outputs = left / "outputs.json"
            started = start_engine(options, left, offline, command_line, load, engine_log, outputs)
            if started.failure:
                raise KcapError(started.failure)
            measured = Measured.of_lowest_rank(list(arms.read_steps(left)), list(read_checks(left)))
            measured.generated = orjson.loads(outputs.read_bytes()) if outputs.exists() else []
        measured.engagements += engagements
        return measured

    measured = run(block=block, seed=schedule.seed, compared=COMPARED)
    names = [str(file) for file in plan_files]
    applied = Applied(
        kcap=__version__,
        plans=[
            PlanCompared(
                plan=name,
                solutions=plan.hashes,
                compared=compare(plan, arm, measured.steps, schedule),
            )
            for arm, (name, plan) in enumerate(zip(names, plans, strict=True))
        ],
        quality={CONTROL if arm < 0 else names[arm]: of for arm, of in quality_of(measured.checks).items()},
        engagement=measured.engagements,
        problems=problems(plans, measured.engagements),
    )
    keep(applied, output)  # whatever becomes of the fresh engines
    fresh: list[tuple[int, Measured]] = []
    for arm in fresh_order(pairs or 0):
        try:
            alone = run(arm=arm)
        except KcapError as error:
            applied = applied.model_copy(update={"problems": [*applied.problems, f"a fresh engine failed: {error}"]})
            break
        fresh.append((arm, alone))
        said = [] if arm < 0 else [f"in a fresh engine: {one}" for one in problems(plans, alone.engagements)]
        update = {"fresh": compare_fresh(fresh), "problems": [*dict.fromkeys([*applied.problems, *said])]}
        applied = applied.model_copy(update=update)
        keep(applied, output)
    if as_json:
        click.echo(applied_bytes(applied))
    else:
        print_applied(applied)
    return None if all(any(one.held for one in plan.compared) for plan in applied.plans) else FAILED


def keep(applied: Applied, output: Path | None) -> None:
    if output is not None:
        output.write_bytes(applied_bytes(applied))


@dataclass
class Measured:
    """What one engine left: the steps of its lowest rank, the checks of the lowest that has logits (a pipeline's last
    stage), what became of the plans in every process, and the token ids that it generated for each request, where it
    ran offline."""

    steps: list[TimedStep]
    checks: list[QualityCheck]
    generated: list[list[int]] = field(default_factory=list)
    engagements: list[Engagement] = field(default_factory=list)

    @classmethod
    def of_lowest_rank(cls, steps: list[TimedStep], checks: list[QualityCheck]) -> Measured:
        """KcapError without a step."""
        if not steps:
            raise KcapError("the engine ran no step that could be measured")
        return cls(_of_lowest(steps), _of_lowest(checks))

    @property
    def decode_us(self) -> float:
        """The mean of a decode step."""
        return fmean([step.us for step in self.steps if step.phase == "decode"] or [step.us for step in self.steps])


def _of_lowest(lines: Sequence[Line]) -> list[Line]:
    rank = min((line.rank for line in lines), default=0)
    return [line for line in lines if line.rank == rank]


def fresh_order(pairs: int) -> list[int]:
    """The arms of fresh engines, the engine's own (-1) and the plan's (0): pairs, each begun by the other arm than the
    one before."""
    return [arm for pair in range(pairs) for arm in ((-1, 0), (0, -1))[pair % 2]]


def compare_fresh(engines: Sequence[tuple[int, Measured]]) -> FreshEngines | None:
    """Fresh engines with the arm of each, pair by pair; None without a whole pair."""
    from kcap.bench.apply.comparison import half_interval
    from kcap.bench.apply.quality import compare_tokens

    pairs = [dict(engines[at : at + 2]) for at in range(0, len(engines) - 1, 2)]
    if not pairs:
        return None
    ratios = [pair[0].decode_us / pair[-1].decode_us for pair in pairs]
    first = pairs[0][-1].generated
    return FreshEngines(
        engine_us=[pair[-1].decode_us for pair in pairs],
        solutions_us=[pair[0].decode_us for pair in pairs],
        median_ratio=median(ratios),
        half_interval=half_interval(ratios),
        tokens=compare_tokens([(pair[-1].generated, pair[0].generated) for pair in pairs]),
        control=compare_tokens([(first, pair[-1].generated) for pair in pairs[1:]]),
    )


def print_applied(applied: Applied) -> None:
    """A row for each plan and kind of step, and what else must be known."""
    from rich.text import Text

    from kcap.show.console import console, plain_table, print_table

    out = console()
    columns = ["sequences", "steps", "engine us", "change", "control", "predicted", "held"]
    table = plain_table(columns, ["phase", "plan"])
    for plan in applied.plans:
        for one in plan.compared:
            us = one.engine_us
            table.add_row(
                f"{one.sequences:,}", f"{one.steps:,}", f"{us:,.1f}", _in_percent(one.solutions, us),
                _in_percent(one.control, us), f"{one.predicted_us / us:+.2%}" if one.held else "–", f"{one.held:.0%}",
                one.phase, Path(plan.plan).name,
            )  # fmt: skip
    print_table(out, table)
    for plan in applied.plans:
        if not any(one.held for one in plan.compared):
            out.print(Text(f"{plan.plan}: no Solution ran in any step: nothing was measured of it", "bold"))
    print_quality(applied.quality)
    if fresh := applied.fresh:
        half = "" if fresh.half_interval is None else f" ± {fresh.half_interval:.2%}"
        pairs = len(fresh.engine_us)
        out.print(f"fresh engines, {pairs} pairs: decode {fresh.median_ratio - 1:+.2%}{half} (median of pairs)")
        for what, tokens in (("with the plan", fresh.tokens), ("without it, again", fresh.control)):
            if tokens is not None:
                same = f"{tokens.same:.0%} of {tokens.requests:,} requests had the same tokens"
                out.print(f"{what}: {same}, {tokens.agreed:.1%} of the tokens came before the first difference")
    for line in applied.problems:
        out.print(Text(line, "bold"))
    out.print(Text("change of a step's time, with the 95 % interval of the paired differences; less is faster", "dim"))


def _in_percent(difference: Difference | None, us: float) -> str:
    if difference is None:
        return "–"
    half = "" if difference.half_interval_us is None else f" ± {difference.half_interval_us / us:.2%}"
    return f"{difference.us / us:+.2%}{half}"

"""`kcap run`: an engine started with the Solutions of a plan in place."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kcap.capture.controller.offline import Offline, record_model
from kcap.capture.controller.output import working_directory
from kcap.commands.record import (
    check_client,
    check_engine_choice,
    engine_options,
    framework_given,
    make_given_client,
    record_command,
)
from kcap.errors import FAILED, CallError, KcapError
from kcap.schemas.results.applied import Engaged, Engagement, LogitsCompared

if TYPE_CHECKING:
    from kcap.capture.controller.run import Run
    from kcap.capture.controller.serving import Client
    from kcap.schemas.results.plan import Plan, Replacement

EXAMPLE = """
\b
Examples:
  kcap run --plan plan.json -- vllm serve meta-llama/Llama-3.1-8B
  kcap run --plan plan.json --model meta-llama/Llama-3.1-8B --load-format dummy
"""
PATH = click.Path(path_type=Path)
COMPARED = 2  # decode steps that are also run with the engine's own kernels


@click.command(epilog=EXAMPLE, context_settings={"allow_interspersed_args": False})
@click.option("--plan", "plan_file", required=True, type=PATH, help="What goes into the engine: of kcap apply.")
@click.option(
    "--trial/--no-trial", default=True, show_default=True, help="Try each Solution alone first, on the Recording."
)
@click.option("--trust", is_flag=True, help="Run kernel sources of a Recording that you did not make here yourself.")
@click.option("--bisect", is_flag=True, help="Should the engine fail, start it again and again to find by which one.")
@engine_options
@click.option("--client", help="Run this command once the server COMMAND serves, then end the server.")
@click.argument("command_line", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(
    plan_file: Path, trial: bool, trust: bool, bisect: bool, client: str | None, ready: str | None,
    ready_timeout: float, engine_log: Path | None, command_line: tuple[str, ...], **offline: Any,
) -> int | None:  # fmt: skip
    """Start an engine with the Solutions of a plan in the place of its kernels, in each of its processes.

    They are put in before the engine compiles and captures graphs. Each is tried alone first, on the recorded shapes:
    one that fails, cannot be captured, differs from the engine's kernel or is slower is left out. A call that is not as
    it was judged runs the engine's own kernel. An engine that cannot hold the plan does not start. At the end a table
    tells in how many steps each Solution ran.
    """
    from kcap.bench.apply.process import session_options
    from kcap.bench.apply.quality import quality_of, read_checks

    plan = read_plan_for_engine(plan_file)
    check_engine_choice(offline["model"], command_line)
    if bisect and command_line and client is None:
        raise CallError("--bisect starts the engine again and again: of --model or a --client only")
    load = given_client(client, ready, ready_timeout, command_line)
    if trial:
        plan = tried(plan, trust)

    def attempt(part: Plan, printed: bool = False) -> Run:
        with temporary_folder("kcap-run-") as left, told([part], left, printed) as engagements:
            options = session_options([part], left, compared=COMPARED)
            started = start_engine(options, left, offline, command_line, load, engine_log)
            if printed:
                print_quality({str(plan_file): of for of in quality_of(list(read_checks(left))).values()})
        engaged.extend(engagements)
        return started

    engaged: list[Engagement] = []
    try:
        started = attempt(plan, printed=True)
    except CallError:
        raise
    except KcapError as error:
        raise KcapError(_why_ended(plan, str(error), attempt if bisect else None)) from None
    if started.failure:
        click.echo(f"kcap: {_why_ended(plan, started.failure, attempt if bisect else None)}", err=True)
    if started.status and started.status > 0:
        return started.status
    return None if not started.failure and any(one.steps for e in engaged for one in e.replacements) else FAILED


def _why_ended(plan: Plan, failure: str, attempt: Callable[[Plan], Run] | None) -> str:
    """What to say of an engine that ended with a failure. `attempt`: starts it with a part of the plan."""
    if attempt is None:
        names = ", ".join(sorted(plan.hashes))
        return f"{failure}\nIt ran with these Solutions: {names}; --bisect finds out which of them it was"
    from kcap.bench.apply.choice import guilty_part

    def fails(part: Sequence[Replacement]) -> bool:
        click.echo(f"kcap: trying {len(part)} of {len(plan.replacements)} replacements", err=True)
        try:
            return bool(attempt(plan.only(part)).failure)
        except KcapError:
            return True

    if fails([]):
        return f"{failure}\nIt fails without any Solution, too"
    guilty = guilty_part(plan.replacements, fails)
    found = [f"{one.recorded_as} for {one.call.operator} (call {one.call.id})" for one in guilty]
    return f"{failure}\nIt fails with {' together with '.join(found)} alone"


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield Path(folder)


@contextmanager
def told(plans: Sequence[Plan], left: Path, printed: bool = True) -> Iterator[list[Engagement]]:
    """Tell, once the engine has ended, what became of the plans in its processes, which left it in the folder `left`.

    Yields the list that they are put into. An engine that did not start because it cannot hold the plan: KcapError.
    """
    from kcap.bench.apply.process import read_engagements

    engagements: list[Engagement] = []
    try:
        yield engagements
    except KcapError:
        refused = next((one.refused for one in read_engagements(left) if one.refused), "")
        if refused:
            raise KcapError(f"the plan cannot be put into this engine: {refused}") from None
        raise
    engagements += read_engagements(left)
    if printed:
        print_engagements(plans, engagements)


def read_plan_for_engine(file: Path) -> Plan:
    """The plan in `file`; CallError where it replaces nothing, so that the engine would run as it is."""
    from kcap.schemas.results.plan import read_plan

    plan = read_plan(file)
    if not plan.replacements:
        raise CallError(f"{file}: replaces nothing: the engine would run as it is (kcap apply says why)")
    return plan


def given_client(client: str | None, ready: str | None, patience: float, command_line: Sequence[str]) -> Client | None:
    """The client of a server; CallError where there is no server, or it is not plain where it answers."""
    check_client(client, ready, command_line)
    return None if client is None else make_given_client(client, ready, patience, False, list(command_line))


def tried(plan: Plan, trust: bool, slower: bool = False) -> Plan:
    """The plan with what could be run alone; what could not is told, and left out."""
    from kcap.bench.apply.trial import try_alone

    before = len(plan.left_out)
    plan = try_alone(plan, trust, slower)
    for left in plan.left_out[before:]:
        click.echo(f"kcap: {left.text}", err=True)
    if not plan.replacements:
        raise CallError("the plan replaces nothing: the engine would run as it is")
    return plan


def start_engine(
    options: Mapping[str, Any], left: Path, offline: Mapping[str, Any], command_line: Sequence[str],
    client: Client | None, log: Path | None, outputs: Path | None = None,
) -> Run:  # fmt: skip
    """Run the engine to its end, without a recording. `options`: of its Session (`session_options`); `outputs`: where
    the token ids go that it generates offline."""
    closed = {**options, "window": "manual"}
    with working_directory(left / "recording.kcap", False) as beside:
        if offline["model"] is not None:
            return record_model(Offline(**offline), beside, closed, log, outputs=outputs)
        closed["command"] = list(command_line)
        return record_command(list(command_line), framework_given(), client, beside, closed, log)


def print_engagements(plans: Sequence[Plan], engagements: Sequence[Engagement]) -> None:
    """What became of the plans in each process."""
    from rich.text import Text

    from kcap.show.console import console, plain_table, print_table

    out = console()
    table = plain_table(["rank", "steps", "held", "eager", "captured", "replayed"], ["Solution", "call"])
    for engagement in engagements:
        for (plan, one), engaged in zip(_replacements(plans), engagement.replacements, strict=False):
            solution = plan.solutions[one.solution]
            table.add_row(
                str(engagement.rank), f"{sum(engagement.steps.values()):,}", f"{engaged.steps:,}",
                f"{engaged.eager:,}", f"{engaged.captured:,}", f"{engaged.replayed:,}",
                f"{solution.author}/{solution.name}", f"{one.call.operator} (call {one.call.id})",
            )  # fmt: skip
    if table.row_count:
        print_table(out, table)
    for line in problems(plans, engagements):
        out.print(Text(line, "bold"))


def print_quality(quality: Mapping[str, LogitsCompared]) -> None:
    """The logits that were compared, by what they are of."""
    from kcap.show.console import console

    out = console()
    if not quality:
        out.print("logits: not compared (no step that ran a Solution could be run twice)")
    for name, of in quality.items():
        kl, rms = ("not finite" if value is None else f"{value:.2g}" for value in (of.kl, of.rms))
        text = f"the same top token for {of.top1:.1%}, KL {kl}, rms of the difference {rms}"
        out.print(f"logits of {of.tokens:,} tokens against the engine's own, {name}: {text}")


def _replacements(plans: Sequence[Plan]) -> list[tuple[Plan, Replacement]]:
    """In the order of an Engagement's."""
    return [(plan, one) for plan in plans for one in plan.replacements]


def problems(plans: Sequence[Plan], engagements: Sequence[Engagement]) -> list[str]:
    """What a user must know of how the plans fared: a process that refused it, Solutions that never ran or failed."""
    found = [f"rank {one.rank} (process {one.pid}): {one.refused}" for one in engagements if one.refused]
    if not any(one.replacements for one in engagements):
        return found or ["no process of the engine put the plan in: it ran as it is"]
    if missing := set(range(max(one.world_size for one in engagements))) - {one.rank for one in engagements}:
        ranks = ", ".join(map(str, sorted(missing)))
        found.append(f"rank {ranks}: did not put the plan in: it ran as it is, or ended without a word")
    for index, (_, one) in enumerate(_replacements(plans)):
        engaged = [e.replacements[index] for e in engagements if index < len(e.replacements)]
        if off := next((each.off for each in engaged if each.off), ""):
            found.append(f"{one.recorded_as} was taken out: {off}")
        elif engaged and not any(each.steps for each in engaged):
            found.append(
                f"{one.recorded_as} ran in no step for call {one.call.id} ({one.call.operator}){_why(engaged)}"
            )
    return found


def _why(engaged: Sequence[Engaged]) -> str:
    """What the invocations of its operator had otherwise."""
    if checked := sum(one.checked for one in engaged):
        return f": it came {checked:,} times, in which it was compared with the engine's own"
    misses = sum((Counter(one.misses) for one in engaged), Counter())
    if not misses:
        return ": the operator was not called"
    told = ", ".join(f"{difference} ({times:,} times)" for difference, times in misses.most_common(3))
    return f": its invocations differed in {told}"

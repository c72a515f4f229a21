"""`kcap record`: run an engine with taps on and write the Recording."""

from __future__ import annotations

import functools
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kcap.capture.controller import run
from kcap.capture.controller.offline import Offline, record_model
from kcap.capture.controller.output import (
    WorkingDirectory,
    is_empty,
    report_recording,
    why_not_replaced,
    working_directory,
)
from kcap.capture.engines import serving_framework
from kcap.capture.session import RECORDERS, Session
from kcap.commands import MOST_SECONDS, FiniteRange, given_options
from kcap.errors import DONE, FAILED, PARTIAL, CallError
from kcap.system import machine

if TYPE_CHECKING:
    from kcap.capture.controller.serving import Client
    from kcap.capture.turns.sender import Load

EXAMPLE = """
\b
Examples:
  kcap record --model meta-llama/Llama-3.1-8B --framework vLLM --load-format dummy --num-layers 2 -o llama.kcap
  kcap record --model Qwen/Qwen3-8B --num-prompts 1,16 --input-len 4096,256 -o loads.kcap  # one after another
  kcap record -o serve.kcap -- vllm serve meta-llama/Llama-3.1-8B --enforce-eager
  kcap record -o mine.kcap -- python my_inference.py
  kcap record -o load.kcap --client "vllm bench serve --model Qwen/Qwen3-8B" -- vllm serve Qwen/Qwen3-8B
"""


class NumbersRange(click.IntRange):
    """What `click.IntRange` takes, and several such numbers: a tuple."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        words: list[Any] = str(value).split(",")
        if len(words) == 1:
            return super().convert(value, param, ctx)
        return tuple(super(NumbersRange, self).convert(word, param, ctx) for word in words)


ENGINE_OPTIONS = (  # of every command that starts an engine: one of its own, by --model, or a server
    click.option("--model", help="A model: a hub id, or a directory with a config.json."),
    click.option(
        "--framework", default="vLLM", show_default=True, help="vLLM, SGLang or TRT-LLM; MLC-LLM by a COMMAND only."
    ),
    click.option(
        "--load-format",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "dummy"]),
        help="dummy: random weights.",
    ),
    click.option("--num-layers", type=click.IntRange(1), help="Cut the model to its first N layers; shapes stay true."),
    click.option("--num-prompts", default=8, show_default=True, type=NumbersRange(1), help="Random prompts."),
    click.option("--input-len", default=128, show_default=True, type=NumbersRange(1), help="Tokens of each prompt."),
    click.option("--output-len", default=32, show_default=True, type=click.IntRange(1), help="Tokens to generate."),
    click.option(
        "--prompts",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="JSON lines: texts or token ids.",
    ),
    click.option("--engine-arg", "engine_args", multiple=True, metavar="KEY=VALUE", help="An argument of the engine."),
    click.option("--eager", is_flag=True, help="Without compilation and graphs, which are the engine's own defaults."),
    click.option(
        "--ready", metavar="URL", help="Of a --client: what answers once the server serves.  [default: by the COMMAND]"
    ),
    click.option(
        "--ready-timeout",
        default=600.0,
        show_default=True,
        type=FiniteRange(0, MOST_SECONDS),
        help="Seconds until it must.",
    ),
    click.option(
        "--engine-log",
        type=click.Path(path_type=Path),
        help="Keep what the engine of --model, or the server under a --client, prints.",
    ),
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command` the options of ENGINE_OPTIONS: the fields of Offline, and those of any server."""
    return functools.reduce(lambda function, option: option(function), reversed(ENGINE_OPTIONS), command)


@click.command(name="record", epilog=EXAMPLE, context_settings={"allow_interspersed_args": False})
@engine_options
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The Recording to write.")
@click.option(
    "--max-steps", "--steps", "steps", type=click.IntRange(1), help="Close the window for good after N recorded steps."
)
@click.option(
    "--window",
    type=click.Choice(["auto", "manual"]),
    help="auto: open from the engine's warm-up on, or while the --client runs; manual: when kcap window says so.",
)
@click.option(
    "--warmup-steps", default=0, type=click.IntRange(0), help="Steps that do not count when the window opens."
)
@click.option("--client", help="Record the server COMMAND while this command runs, then end the server.")
@click.option(
    "--workload",
    type=click.Path(path_type=Path, exists=True),
    metavar="TRACE",
    help="Send the turns of a trace to the server COMMAND, or run them by --model: a Recording's, or a file's.",
)
@click.option("--speed", default=1.0, show_default=True, type=FiniteRange(0, min_open=True), help="Of --workload.")
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    help="Of --workload: so many sessions at a time, each begun as another ends.",
)
@click.option(
    "--check-coverage", is_flag=True, help="Profile a few steps first: how much GPU time is of recorded calls?"
)
@click.option(
    "--agent-trace",
    is_flag=True,
    help="Keep what the server COMMAND is asked and answers, turn by turn, without texts.",
)
@click.option("--keep-text", is_flag=True, help="With --agent-trace: keep the texts, too; secrets are redacted.")
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    help="Record the engine with kcap apply's Solutions (which kcap run tries first).",
)
@click.option("--keep-tokens", is_flag=True, help="Keep the values of token ids, too.")
@click.option(
    "--recorder",
    default="auto",
    type=click.Choice(RECORDERS),
    help="auto: native where a compiler is.",
)
@click.option(
    "--exit-code",
    default="command",
    show_default=True,
    type=click.Choice(["command", "kcap"]),
    help="How to end after a COMMAND (without --client) that failed: command: with its own status, 128+N after signal "
    "N; kcap: with 3 if there is a Recording, else 1.",
)
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.argument("command_line", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(
    model: str | None, framework: str, output: Path, steps: int | None, keep_tokens: bool, recorder: str, force: bool,
    check_coverage: bool, window: str | None, warmup_steps: int, client: str | None, ready: str | None,
    ready_timeout: float, engine_log: Path | None, exit_code: str, agent_trace: bool, keep_text: bool,
    plan_file: Path | None, workload: Path | None, speed: float, concurrency: int | None,
    command_line: tuple[str, ...], **offline: Any,
) -> None:  # fmt: skip
    """Record what an inference engine runs: a model offline, or your own COMMAND (`vllm serve …`, `python …`).

    Every process of the engine records its operator calls from the end of its warm-up on. Ctrl-C ends a COMMAND in
    order; its Recording is complete. SIGUSR1 opens the window and SIGUSR2 closes it, as `kcap window` does.
    """
    if workload is not None and model is None:
        client = _sender(workload, speed, concurrency, client, ready, list(command_line))
    elif workload is None and (_option_given("speed") or concurrency is not None):
        raise CallError("--speed and --concurrency are of --workload: give that, too")
    load = _load(workload, speed, concurrency) if workload is not None and model is not None else None
    _check_options(model, command_line, client, ready, check_coverage)
    server = _traced_server(list(command_line), keep_text) if agent_trace or keep_text else list(command_line)
    _check_engine_log(engine_log, model is not None or client is not None, output)
    closed = window == "manual" or (client is not None and window is None)
    options: dict[str, Any] = {
        "output": str(output.absolute()), "steps": steps, "keep_tokens": keep_tokens, "recorder": recorder,
        "check_coverage": check_coverage, "window": "manual" if closed else "auto", "warmup_steps": warmup_steps,
        "agent_trace": agent_trace, "keep_text": keep_text, "hash_key": secrets.token_hex(32) if agent_trace else "",
    }  # fmt: skip
    opens = window != "manual"
    given = None if client is None else make_given_client(client, ready, ready_timeout, opens, list(command_line))
    try:
        with run.ended_by_signals(), working_directory(output, force) as beside, planned(plan_file) as extension:
            options |= extension
            if model is not None:
                offered = Offline(model=model, framework=framework, **offline)
                ran = record_model(offered, beside, options, engine_log, load)
            else:
                options["command"] = list(command_line)
                ran = record_command(server, framework_given(), given, beside, options, engine_log)
            if reason := why_not_replaced(ran.recording, output):
                shutil.rmtree(beside.directory)
                raise run.NoRecordingError(reason, ran.status)
    except run.NoRecordingError as error:
        error.exit_code = _own_code(error.status, exit_code) or FAILED
        raise
    report_recording(ran.recording, output, ran.failure)
    if code := _own_code(ran.status if command_line else None, exit_code):
        raise click.exceptions.Exit(code)
    if is_empty(ran.recording):
        raise click.exceptions.Exit(FAILED)
    if ran.failure or not ran.recording.metadata.complete:
        raise click.exceptions.Exit(PARTIAL)


@contextmanager
def planned(plan_file: Path | None) -> Iterator[dict[str, Any]]:
    """What the Session says of an engine that runs with the plan; nothing without one.

    What was made of the plan in the engine's processes is told in the end.
    """
    if plan_file is None:
        yield {}
        return
    from kcap.bench.apply import process
    from kcap.commands.run import read_plan_for_engine, temporary_folder, told

    plan = read_plan_for_engine(plan_file)
    with temporary_folder("kcap-plan-") as left, told([plan], left):
        yield process.session_options([plan], left)


def _check_options(
    model: str | None, command_line: Sequence[str], client: str | None, ready: str | None, check_coverage: bool
) -> None:
    """CallError where the options do not fit together, or this machine."""
    check_engine_choice(model, command_line)
    if (model is not None or client is not None) and _option_given("exit_code"):
        raise CallError("--exit-code: of a COMMAND without a --client only")
    check_client(client, ready, command_line)
    if check_coverage and not machine.has_gpu():
        raise CallError("--check-coverage compares with what ran on a GPU, and this machine has none: leave it out")


def check_engine_choice(model: str | None, command_line: Sequence[str]) -> None:
    """CallError where neither or both of a model and a COMMAND are given, or options that would not be heeded then."""
    if (model is None) == (not command_line):
        raise CallError("give either --model MODEL or -- COMMAND")
    if command_line:
        _refuse([field.name for field in fields(Offline) if field.name != "framework"])
    if _option_given("prompts") is not None and any(_option_given(name) for name in ("num_prompts", "input_len")):
        raise CallError("--prompts FILE has the prompts: leave --num-prompts and --input-len out")


def check_client(client: str | None, ready: str | None, command_line: Sequence[str]) -> None:
    """CallError for a client without a server, or what is of a client without one."""
    if client is None and (ready is not None or _option_given("ready_timeout") is not None):
        raise CallError(f"{'--ready-timeout' if ready is None else '--ready'} is of a --client: give that, too")
    if client is not None and not command_line:
        raise CallError("--client needs a server: give -- COMMAND")


def _sender(
    workload: Path, speed: float, concurrency: int | None, client: str | None, ready: str | None, server: list[str]
) -> str:
    """The client that sends a trace to `server`; CallError where there is another, or it is not plain where."""
    from kcap.capture.controller.serving import ready_url

    if client is not None:
        raise CallError("--workload is a client of its own: leave --client out")
    url = ready or ready_url(server)
    if url is None:
        raise CallError("--workload: pass --ready URL, so that kcap knows where the server answers")
    words = [sys.executable, "-m", "kcap.capture.turns.load", str(workload), "--url", url, "--speed", str(speed)]
    return shlex.join([*words, *(["--concurrency", str(concurrency)] if concurrency else [])])


def _load(workload: Path, speed: float, concurrency: int | None) -> Load:
    """The turns for an engine without a server; CallError where prompts are given, too, or the trace has none."""
    from kcap.capture.turns.load import requests_of
    from kcap.capture.turns.sender import Load
    from kcap.schemas.flashinfer.agents import turns_in

    if any(_option_given(name) for name in ("prompts", "num_prompts", "input_len", "output_len")):
        raise CallError("--workload has the prompts, and their answers' lengths: leave other options for them out")
    requests = requests_of(turns_in(workload)[0])
    if not requests:
        raise CallError(f"{workload}: no turn in it was answered")
    return Load(requests, speed, concurrency)


def _traced_server(command_line: list[str], keep_text: bool) -> list[str]:
    """The server's command with kcap in front of what it is asked; CallError where kcap cannot be put there."""
    if keep_text and not _option_given("agent_trace"):
        raise CallError("--keep-text is of --agent-trace: give that, too")
    framework = serving_framework(command_line)
    if framework is None or framework.middleware is None:
        raise CallError("--agent-trace: of vLLM's and SGLang's own servers only: -- vllm serve MODEL …")
    return [*command_line, *framework.middleware]


def _check_engine_log(path: Path | None, apart: bool, output: Path) -> None:
    """CallError where `path` cannot be written, before anything is started. `apart`: its output is not the user's."""
    if path is None:
        return
    if not apart:
        raise CallError("--engine-log: of --model or a --client only; a COMMAND's output is yours: 2>&1 | tee FILE")
    around = (path.resolve(), *path.resolve().parents)
    if output.resolve() in around:
        raise CallError(f"--engine-log {path}: put it outside of {output}, which is replaced as a whole")
    if any((folder / "recording.json").exists() for folder in around):
        raise CallError(f"--engine-log {path}: put it outside of that Recording")
    if path.exists() and not path.is_file():
        raise CallError(f"--engine-log {path}: give a regular file")
    fresh = not path.exists()
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    except OSError as error:
        raise CallError(f"--engine-log {path}: {error.strerror}") from None
    if fresh:  # the call may yet be refused
        path.unlink()


def _own_code(status: int | None, exit_code: str) -> int:
    """What kcap ends with for a COMMAND that ended with `status` by itself; 0 where that is not for it to say."""
    if not status or exit_code == "kcap":
        return DONE
    return status if status > 0 else 128 - status


def framework_given() -> str | None:
    """The engine that a COMMAND is said to start; None where that is left to its processes."""
    named: str | None = _option_given("framework")
    return named


def _option_given(name: str) -> Any:
    """An option's value if the user gave one; None where it would be the default."""
    return click.get_current_context().params[name] if given_options([name]) else None


def _refuse(names: Collection[str]) -> None:
    """CallError where one of these options is given, of which a COMMAND would heed none."""
    if options := given_options(names):
        raise CallError(f"{options}: of --model only; a COMMAND has options of its own")


def make_given_client(text: str, url: str | None, patience: float, opens: bool, server: list[str]) -> Client:
    """The client that `text` is the command of, as `serving.make_client`."""
    from kcap.capture.controller import serving

    try:
        command_line = shlex.split(text)
    except ValueError as error:
        raise CallError(f"--client {text}: {error}") from None
    return serving.make_client(command_line, url, patience, opens, server)


def record_command(
    command_line: list[str], framework: str | None, client: Client | None, working: WorkingDirectory,
    options: dict[str, Any], log: Path | None,
) -> run.Run:  # fmt: skip
    """Record a user's own command, under `client` where there is one. `options`: the Session's."""
    from kcap.capture.controller import frameworks, serving

    named = frameworks.find_adapter(framework).FRAMEWORK if framework else None
    started = named or serving_framework(command_line)
    if started is not None and frameworks.runs_here(command_line):
        frameworks.tell_hooks(started)
    session = Session(
        directory=str((working.directory / "shards").resolve()), framework=named.name if named else None,
        client=client.command if client else [], **options,
    )  # fmt: skip
    session.write()
    if client is not None:
        return serving.serve(command_line, client, session, working, log)
    return run.record_command_line(command_line, session, working, None)

"""`kcap record`: run an engine with taps on and write the Recording."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import orjson

from kcap.capture.config import Session, check_place
from kcap.errors import PARTIAL, CallError, KcapError
from kcap.schemas.coverage import CoverageSummary
from kcap.schemas.recording import Recording

EXAMPLE = """
\b
Examples:
  kcap record --model meta-llama/Llama-3.1-8B --framework vLLM --load-format dummy --num-layers 2 -o llama.kcap
  kcap record -o serve.kcap -- vllm serve meta-llama/Llama-3.1-8B --enforce-eager
"""


@dataclass(frozen=True)
class Offline:
    """The options of an offline recording."""

    model: str
    framework: str
    load_format: str
    num_layers: int | None
    num_prompts: int
    input_len: int
    output_len: int
    prompts: Path | None
    engine_args: tuple[str, ...]
    eager: bool


@click.command(name="record", epilog=EXAMPLE)
@click.option("--model", help="A model: a hub id, or a directory with a config.json.")
@click.option("--framework", default="vLLM", show_default=True, help="vLLM, SGLang, TRT-LLM or MLC-LLM.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The Recording to write.")
@click.option(
    "--load-format",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "dummy"]),
    help="dummy: random weights.",
)
@click.option("--num-layers", type=click.IntRange(1), help="Cut the model to its first N layers; shapes stay true.")
@click.option("--num-prompts", default=8, show_default=True, type=click.IntRange(1), help="Random prompts.")
@click.option("--input-len", default=128, show_default=True, type=click.IntRange(1), help="Tokens of each prompt.")
@click.option("--output-len", default=32, show_default=True, type=click.IntRange(1), help="Tokens to generate.")
@click.option(
    "--prompts", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="JSON lines: texts or token ids."
)
@click.option("--steps", type=click.IntRange(1), help="Close the window after N steps.")
@click.option("--engine-arg", "engine_args", multiple=True, metavar="KEY=VALUE", help="An argument of the engine.")
@click.option("--eager", is_flag=True, help="Without compilation and graphs, which are the engine's own defaults.")
@click.option(
    "--check-coverage", is_flag=True, help="Profile a few steps first: how much GPU time is of recorded calls?"
)
@click.option("--keep-tokens", is_flag=True, help="Keep the values of token ids, too.")
@click.option(
    "--recorder",
    default="auto",
    type=click.Choice(["auto", "native", "python"]),
    help="auto: native where a compiler is.",
)
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.argument("command_line", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(
    model: str | None, framework: str, output: Path, steps: int | None, keep_tokens: bool, recorder: str, force: bool,
    check_coverage: bool, command_line: tuple[str, ...], **offline: Any,
) -> None:  # fmt: skip
    """Record what an inference engine runs: a model offline, or your own COMMAND (such as `vllm serve …`).

    Every process of the engine records its operator calls from the end of its warm-up on. Ctrl-C ends a COMMAND in
    order; its Recording is complete.
    """
    if (model is None) == (not command_line):
        raise CallError("give either --model MODEL or -- COMMAND")
    options = {"steps": steps, "keep_tokens": keep_tokens, "recorder": recorder, "check_coverage": check_coverage}
    with place(output, force) as directory:
        if model is not None:
            recording = _record_model(Offline(model=model, framework=framework, **offline), directory, options)
        else:
            recording = _record_command(list(command_line), framework, directory, options)
    say_what_was_recorded(recording, output)
    if not any(call.total for call in recording.calls):
        raise KcapError(f"nothing was recorded: no step ended while the window was open{_profiled(recording)}")
    if not recording.metadata.complete:
        raise click.exceptions.Exit(PARTIAL)


def _profiled(recording: Recording) -> str:
    found = CoverageSummary.model_validate(recording.metadata.coverage or {})
    return f"; the first {found.steps} steps ran under the profiler (--check-coverage)" if found.steps else ""


@contextmanager
def place(output: Path, force: bool) -> Iterator[Path]:
    """A working directory beside `output`, moved there when all went well; what was recorded is kept if not."""
    check_place(output, force, "--force")
    output.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        yield directory
    except BaseException as error:
        if not any(directory.glob("shards/*.jsonl")):
            shutil.rmtree(directory, ignore_errors=True)
        elif not isinstance(error, KcapError):
            click.echo(f"kcap: what was recorded is in {directory}: kcap recover {directory} -o {output}", err=True)
        raise
    if output.exists():
        shutil.rmtree(output)
    directory.rename(output)


def _record_model(offline: Offline, directory: Path, options: dict[str, Any]) -> Recording:
    from kcap.capture import frameworks, workload

    engine = frameworks.find_framework(offline.framework)
    target = frameworks.find_model(offline.model, offline.load_format)
    if target.weights_from_hub:
        click.echo(f"kcap: {target.model} comes from the hub; without one, pass --load-format dummy", err=True)
    prompts = workload.read_prompts(offline.prompts) if offline.prompts else None
    work = workload.Workload(offline.num_prompts, offline.input_len, offline.output_len, prompts)
    given = engine_arguments(offline.engine_args)
    if target.bundled and prompts and any(isinstance(prompt, str) for prompt in prompts):
        raise CallError(f"{offline.model} has no tokenizer here: give the prompts as token ids")
    longest = max(map(len, prompts)) if prompts else offline.input_len
    tokens = longest + offline.output_len
    start = frameworks.Start(target, offline.load_format, offline.num_layers, offline.eager, given, tokens)
    arguments = frameworks.ARGUMENTS[engine.module](start)
    session = Session(
        directory=str((directory / "shards").resolve()), framework=engine.framework, model=target.model,
        layers_model=target.layers_model, engine_arguments=arguments, **options,
    )  # fmt: skip
    job = {"session": str(session.file), "workload": asdict(work), "engine_arguments": arguments}
    return _run_offline(engine.module, job, session, directory)


def _run_offline(module: str, job: dict[str, Any], session: Session, directory: Path) -> Recording:
    session.write()
    file = directory / "shards" / "job.json"
    file.write_bytes(orjson.dumps(job))
    log = directory / "shards" / "engine.log"  # gone with the shards: an engine logs its arguments, secrets too
    command_line = [sys.executable, "-P", "-m", f"kcap.capture.engines.{module}_offline", str(file.resolve())]
    return _follow(command_line, session, directory, log)


def _record_command(command_line: list[str], framework: str, directory: Path, options: dict[str, Any]) -> Recording:
    from kcap.capture import frameworks

    engine = frameworks.find_adapter(framework)
    session = Session(
        directory=str((directory / "shards").resolve()), framework=engine.framework, command=command_line, **options
    )
    session.write()
    return _follow(command_line, session, directory, None)


def _follow(command_line: list[str], session: Session, directory: Path, log: Path | None) -> Recording:
    from kcap.capture import launch
    from kcap.capture.merge import discard, merge

    _prepare_recorder(session)
    with _progress() as report:
        status = launch.run(command_line, session, report, log)
    if not launch.registered(session):
        _explain_silence(session, status, log)
    recording = merge(session, directory)
    said = f"{status}:\n{launch.last_lines(log)}" if status and log else ""
    discard(session)
    if said and not recording.calls and not any(tap.status == "failed" for tap in recording.metadata.taps):
        raise KcapError(f"the engine ended before its first step, with status {said}")
    if said:
        click.echo(f"kcap: the engine ended with status {said}", err=True)
    return recording


def _prepare_recorder(session: Session) -> None:
    """Build the native recorder before the engine starts; a failure is the engine processes' own to report."""
    from kcap.capture.native_build import Unavailable
    from kcap.capture.taps.dispatcher import build

    if session.recorder == "python":
        return
    try:
        build()
    except (Unavailable, ImportError) as error:
        click.echo(f"kcap: {error}", err=True)


def _explain_silence(session: Session, status: int, log: Path | None) -> None:
    from kcap.capture import launch

    if status and log:
        raise KcapError(f"the engine did not start (status {status}):\n{launch.last_lines(log)}")
    from kcap.capture import plugins

    excluded = plugins.excluded(None if session.command else session.framework)
    if excluded:
        raise KcapError(f"no process of the engine had kcap in it: {excluded} leaves it out; add kcap to it")
    where = session.command[0] if session.command else sys.executable
    raise KcapError(
        f"no process of the engine had kcap in it (status {status}): is {shlex.quote(where)} the engine, and is kcap "
        "installed in its environment?"
    )


@contextmanager
def _progress() -> Iterator[Any]:
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting the engine") as status:
        yield status.update


def engine_arguments(words: tuple[str, ...]) -> dict[str, Any]:
    """`KEY=VALUE` words as engine arguments: VALUE is JSON where it parses (true, 4096, {"a": 1}), else text."""
    out: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.replace("-", "_").isidentifier():
            raise CallError(f"--engine-arg {word}: write KEY=VALUE")
        try:
            out[key.replace("-", "_")] = orjson.loads(value)
        except ValueError:
            out[key.replace("-", "_")] = {"True": True, "False": False, "None": None}.get(value, value)
    return out


def say_what_was_recorded(recording: Recording, output: Path) -> None:
    metadata = recording.metadata
    steps = ", ".join(f"{times} {phase}" for phase, times in metadata.steps.items()) or "none"
    kernels, calls = metadata.totals.get("kernels", 0), metadata.totals.get("calls", 0)
    click.echo(f"{output}: {kernels} kernel calls ({calls} distinct calls) in steps: {steps}", err=True)
    for tap in metadata.taps:
        if tap.status == "failed":
            click.echo(f"kcap: {tap.name} failed in process {tap.pid} (rank {tap.rank}): {tap.detail}", err=True)
    if metadata.coverage is not None:
        from kcap.capture import coverage

        click.echo("\n".join(coverage.lines(CoverageSummary.model_validate(metadata.coverage))), err=True)
    if not metadata.complete:
        click.echo("kcap: the Recording is partial; kcap show says why", err=True)
    click.echo(f"Next: kcap show {shlex.quote(str(output))}", err=True)

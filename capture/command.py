"""`kcap record`: run an engine with taps on and write the Recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kcap.capture.config import Session
from kcap.capture.offline import Offline, record_model
from kcap.capture.output import place, say_what_was_recorded
from kcap.errors import PARTIAL, CallError, KcapError
from kcap.schemas.coverage import CoverageSummary
from kcap.schemas.recording import Recording

EXAMPLE = """
\b
Examples:
  kcap record --model meta-llama/Llama-3.1-8B --framework vLLM --load-format dummy --num-layers 2 -o llama.kcap
  kcap record -o serve.kcap -- vllm serve meta-llama/Llama-3.1-8B --enforce-eager
"""


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
            recording = record_model(Offline(model=model, framework=framework, **offline), directory, options)
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


def _record_command(command_line: list[str], framework: str, directory: Path, options: dict[str, Any]) -> Recording:
    from kcap.capture import follow, frameworks

    engine = frameworks.find_adapter(framework)
    session = Session(
        directory=str((directory / "shards").resolve()), framework=engine.FRAMEWORK.name, command=command_line,
        **options,
    )  # fmt: skip
    session.write()
    return follow.follow(command_line, session, directory, None)

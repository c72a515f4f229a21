"""A model recorded offline: the options and prompts, and the engine started with them in a process of its own."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import orjson

from kcap.capture.controller import run
from kcap.capture.controller.output import WorkingDirectory
from kcap.capture.engines import Start
from kcap.capture.session import Numbers, Prompt, Session, Workload, as_list
from kcap.capture.turns.sender import Load, Request
from kcap.errors import CallError, FormatError


@dataclass(frozen=True)
class Offline:
    """The options of an offline recording."""

    model: str
    framework: str
    load_format: str
    num_layers: int | None
    num_prompts: Numbers
    input_len: Numbers
    output_len: int
    prompts: Path | None
    engine_args: tuple[str, ...]
    eager: bool


def record_model(
    offline: Offline, working: WorkingDirectory, options: dict[str, Any], log: Path | None = None,
    load: Load | None = None, outputs: Path | None = None,
) -> run.Run:  # fmt: skip
    """Record `offline` into `working`. `options`: the Session's own; `log`: where the engine's output is kept; `load`:
    what to ask of the engine in place of prompts; `outputs`: where each prompt's generated token ids go, as JSON."""
    from kcap.capture.controller import frameworks

    engine = frameworks.find_framework(offline.framework)
    for check in frameworks.check_plugin(engine.FRAMEWORK):
        if check.state == "problem":
            raise CallError(f"{engine.FRAMEWORK.name} would not load kcap: {check.found}: {check.fix}")
    frameworks.tell_hooks(engine.FRAMEWORK)
    target = frameworks.find_model(offline.model, offline.load_format)
    load_format = "dummy" if target.bundled else offline.load_format
    if load_format != offline.load_format:
        click.echo(f"kcap: {target.model} is kcap's own configuration, without weights: they are random", err=True)
    if target.weights_from_hub:
        click.echo(f"kcap: {target.model} comes from the hub; without one, pass --load-format dummy", err=True)
    prompts = read_prompts(offline.prompts) if offline.prompts else None
    work = make_workload(offline, prompts) if load is None else workload_of(load)
    engine_args = engine_arguments(offline.engine_args)
    start = Start(target, load_format, offline.num_layers, offline.eager, engine_args, work.longest)
    arguments = engine.arguments(start)
    if arguments.get("skip_tokenizer_init") and prompts and any(isinstance(prompt, str) for prompt in prompts):
        raise CallError(f"{offline.model} has no tokenizer here: give the prompts as token ids")
    if arguments.get("skip_tokenizer_init") and load is not None and any(r.prompt is None for r in load.requests):
        raise CallError(f"{offline.model} has no tokenizer here, and the trace has texts: give it a directory with one")
    session = Session(
        directory=str((working.directory / "shards").resolve()), framework=engine.FRAMEWORK.name, model=target.model,
        layers_model=target.layers_model, engine_arguments=arguments, **options,
    )  # fmt: skip
    job = {"session": str(session.file), "workload": asdict(work), "engine_arguments": arguments}
    job |= {} if load is None else {"load": asdict(load)}
    job |= {} if outputs is None else {"outputs": str(outputs.resolve())}
    assert engine.OFFLINE is not None  # `find_framework` has seen to it
    return _run_engine(engine.OFFLINE, job, session, working, log)


def make_workload(offline: Offline, prompts: list[Prompt] | None) -> Workload:
    counts, lengths = len(as_list(offline.num_prompts)), len(as_list(offline.input_len))
    if lengths not in (1, counts):
        raise CallError(
            f"--input-len has {lengths} numbers, --num-prompts {counts}: give one for all loads, or as many as those"
        )
    return Workload(offline.num_prompts, offline.input_len, offline.output_len, prompts)


def workload_of(load: Load) -> Workload:
    """As much as a load asks of the engine at a time: by it caches and contexts are made, and steps are profiled."""
    prompts = [_length(request) for request in load.requests]
    sessions = sum(request.parent is None for request in load.requests)
    answer = max(request.tokens for request in load.requests)
    return Workload(min(sessions, load.concurrency or sessions), max(prompts), answer)


def _length(request: Request) -> int:
    """Of a chat no fewer than its tokens: the bytes that its members would have."""
    return len(orjson.dumps(request.body)) if request.prompt is None else request.prompt.length


def _run_engine(
    module: str, job: dict[str, Any], session: Session, working: WorkingDirectory, log: Path | None
) -> run.Run:
    session.write()
    file = Path(session.directory) / "job.json"
    file.write_bytes(orjson.dumps(job))
    log = log or Path(session.directory) / "engine.log"  # gone with the shards: it has the arguments, secrets too
    command_line = [sys.executable, "-P", "-m", module, str(file.resolve())]
    return run.record_command_line(command_line, session, working, log)


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


def read_prompts(path: Path) -> list[Prompt]:
    """Read a JSON-lines file: each line a string, a list of token ids, or an object with `prompt` or
    `prompt_token_ids`; FormatError with the line otherwise."""
    prompts = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                prompts.append(_parse_prompt(orjson.loads(line)))
            except ValueError as error:
                raise FormatError(f"{path}:{number}", str(error)) from None
    if not prompts:
        raise FormatError(str(path), "no prompt in it: one JSON string or list of token ids a line")
    return prompts


def _parse_prompt(data: Any) -> Prompt:
    if isinstance(data, dict):
        data = data.get("prompt", data.get("prompt_token_ids"))
    if isinstance(data, str) and data:
        return data
    if isinstance(data, list) and data and all(type(token) is int and token >= 0 for token in data):
        return data
    raise ValueError('neither a text nor a list of token ids: write {"prompt": "…"} or {"prompt_token_ids": [1, 2]}')

"""`kcap replay PATH --fidelity`: what replaying gives, and where it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import orjson
from rich.progress import Progress, TaskID

from kcap.errors import DONE, PARTIAL, CallError
from kcap.replay.fidelity import picture, report
from kcap.replay.fidelity.document import document
from kcap.replay.fidelity.engine import KindSteps, profiled_kinds
from kcap.replay.fidelity.options import Options
from kcap.replay.fidelity.replaying import replayer
from kcap.replay.fidelity.run import Ran, run
from kcap.replay.report import console
from kcap.schemas.jsonfile import write_json
from kcap.schemas.recording import Recording, load
from kcap.schemas.source import detect


def fidelity(path: Path, options: Options, bar: Progress) -> int:
    """Hold a Recording's profiled steps against their replay; the exit code: 0 within the bounds, 3 outside."""
    if options.device == "cpu":
        raise CallError("--fidelity compares GPU time: pass no --device cpu")
    if detect(path) != "recording":
        raise CallError(f"{path}: --fidelity takes a Recording, made with --check-coverage")
    if options.output is not None:
        picture.require()
    recording = load(path)
    kinds = profiled_kinds(recording)
    ran, environment = replayed(recording, kinds, options, bar)
    if options.output is not None:
        write(options.output, recording, ran, environment)
    tell(recording, ran, environment, options)
    return DONE if ran.fidelity.holds else PARTIAL


def replayed(
    recording: Recording, kinds: list[KindSteps], options: Options, bar: Progress
) -> tuple[Ran, dict[str, Any]]:
    with replayer(recording, options.device, options.seconds, options.timeout, options.trust) as replays, bar:
        task: TaskID = bar.add_task("replay", total=sum(len(kind.invocations) + 1 for kind in kinds))

        def tell(name: str) -> None:
            bar.update(task, advance=1, description=name[:40])

        return run(recording, kinds, replays, tell), replays.environment


def tell(recording: Recording, ran: Ran, environment: dict[str, Any], options: Options) -> None:
    """Print the table, or JSON; then what was written, or how to have it."""
    if options.as_json:
        click.echo(orjson.dumps(contents(recording, ran, environment), option=orjson.OPT_INDENT_2))
        return
    report.show(console(), ran.fidelity, environment, options.rows, recording.metadata.device)
    if options.output is not None:
        click.echo(f"\nfigure: {options.output / 'fidelity.png'}")
    else:
        click.echo(f"\nas a figure: kcap replay {recording.path} --fidelity -o {recording.path.stem}.fidelity")


def contents(recording: Recording, ran: Ran, environment: dict[str, Any]) -> dict[str, Any]:
    known = {"path": str(recording.path), "recorded_on": recording.metadata.device, "environment": environment}
    return {**known, **document(ran.fidelity)}


def write(folder: Path, recording: Recording, ran: Ran, environment: dict[str, Any]) -> None:
    """The figure, all of it in JSON, and the measurements that it rests on."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "fidelity.json", contents(recording, ran, environment))
    (folder / "measurements.jsonl").write_bytes(b"".join(one.line() for one in ran.measurements))
    (folder / "programs.jsonl").write_bytes(b"".join(one.line() for one in ran.programs))
    picture.draw(ran.fidelity, folder / "fidelity.png", heading(recording, environment))


def heading(recording: Recording, environment: dict[str, Any]) -> str:
    """Model, engine and GPU: `meta-llama/Llama-3.1-8B · vLLM 0.22.1 · NVIDIA H200`."""
    known = recording.metadata
    engine = f"{known.framework} {known.framework_version or ''}".strip() if known.framework else None
    return " · ".join(str(part) for part in (known.model, engine, environment.get("device_name")) if part)

"""`kcap replay PATH --fidelity`: what replaying gives, and where it goes: a table, a figure, JSON.

In JSON is all that the table has, in microseconds of one step.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import orjson
from rich.progress import Progress, TaskID

from kcap.errors import DONE, PARTIAL, CallError
from kcap.replay.calls.report import console
from kcap.replay.fidelity import figure, report
from kcap.replay.fidelity.compare import (
    KERNEL_BOUND,
    KERNEL_SHARE,
    TOTAL_BOUND,
    ComparedCall,
    ComparedStep,
    MissingCall,
)
from kcap.replay.fidelity.engine import KindSteps, profiled_kinds
from kcap.replay.fidelity.replaying import FidelityRun, replay_kinds, replayer
from kcap.replay.fidelity.verdict import SPAN_BOUND, Fidelity, KindFidelity
from kcap.replay.options import FidelityOptions
from kcap.schemas.files.jsonfile import write_json
from kcap.schemas.input_kind import detect_input
from kcap.schemas.recording.recording import Recording, load
from kcap.schemas.recording.signature import call_key, signature


def replay_fidelity(path: Path, options: FidelityOptions, bar: Progress) -> int:
    """Hold a Recording's profiled steps against their replay; the exit code: 0 within the bounds, 3 outside."""
    if options.device == "cpu":
        raise CallError("--fidelity compares GPU time: pass no --device cpu")
    if detect_input(path) != "recording":
        raise CallError(f"{path}: --fidelity takes a Recording, made with --check-coverage")
    if options.output is not None:
        figure.require_matplotlib()
    recording = load(path)
    kinds = profiled_kinds(recording)
    ran, environment = replay_steps(recording, kinds, options, bar)
    if options.output is not None:
        write_files(options.output, recording, ran, environment)
    print_fidelity(recording, ran, environment, options)
    return DONE if ran.fidelity.holds else PARTIAL


def replay_steps(
    recording: Recording, kinds: list[KindSteps], options: FidelityOptions, bar: Progress
) -> tuple[FidelityRun, dict[str, Any]]:
    with replayer(recording, options.device, options.seconds, options.timeout, options.trust) as replays, bar:
        task: TaskID = bar.add_task("replay", total=sum(len(kind.invocations) + 1 for kind in kinds))

        def tell(name: str) -> None:
            bar.update(task, advance=1, description=name[:40])

        return replay_kinds(recording, kinds, replays, tell), replays.environment


def print_fidelity(
    recording: Recording, ran: FidelityRun, environment: dict[str, Any], options: FidelityOptions
) -> None:
    """Print the table, or JSON; then what was written, or how to have it."""
    if options.as_json:
        click.echo(orjson.dumps(json_document(recording, ran, environment), option=orjson.OPT_INDENT_2))
        return
    report.print_kinds(console(), ran.fidelity, environment, options.rows, recording.metadata.device)
    if options.output is not None:
        click.echo(f"\nfigure: {options.output / 'fidelity.png'}")
    else:
        click.echo(f"\nas a figure: kcap replay {recording.path} --fidelity -o {recording.path.stem}.fidelity")


def json_document(recording: Recording, ran: FidelityRun, environment: dict[str, Any]) -> dict[str, Any]:
    known = {"path": str(recording.path), "recorded_on": recording.metadata.device, "environment": environment}
    return {**known, **fidelity_document(ran.fidelity)}


def write_files(folder: Path, recording: Recording, ran: FidelityRun, environment: dict[str, Any]) -> None:
    """The figure, all of it in JSON, and the measurements that it rests on."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "fidelity.json", json_document(recording, ran, environment))
    (folder / "measurements.jsonl").write_bytes(b"".join(one.line() for one in ran.measurements))
    (folder / "programs.jsonl").write_bytes(b"".join(one.line() for one in ran.programs))
    figure.draw_figure(ran.fidelity, folder / "fidelity.png", recording_heading(recording, environment))


def recording_heading(recording: Recording, environment: dict[str, Any]) -> str:
    """Model, engine and GPU: `meta-llama/Llama-3.1-8B · vLLM 0.22.1 · NVIDIA H200`."""
    known = recording.metadata
    engine = f"{known.framework} {known.framework_version or ''}".strip() if known.framework else None
    return " · ".join(str(part) for part in (known.model, engine, environment.get("device_name")) if part)


BOUNDS = {"total": TOTAL_BOUND, "kernel": KERNEL_BOUND, "kernel_share": KERNEL_SHARE, "span": SPAN_BOUND}


def fidelity_document(found: Fidelity) -> dict[str, Any]:
    """Times at the top are of all profiled steps."""
    return {
        "holds": found.holds,
        "bounds": BOUNDS,
        "engine_us": found.engine_us(),
        "replayed_us": found.replayed_us(),
        "missing_us": found.missing_us(),
        "error": found.error,
        "total_by": dict(found.by_state()),
        "kinds": [_kind_fields(kind) for kind in found.kinds],
    }


def _kind_fields(kind: KindFidelity) -> dict[str, Any]:
    return {
        **asdict(kind.kind),
        "steps": kind.steps,
        "sm_mhz": kind.sm_mhz,
        "outside": list(kind.outside()),
        "holds_by": [state.state for state in kind.holding],
        "total_by": kind.best.state,
        "states": {state.state: _state_fields(state) for state in (kind.serving, kind.in_program)},
        "span": {**asdict(kind.span), "own_us": kind.span.own_us} if kind.span else None,
        "program": {**asdict(kind.program), "over_span": kind.span_ratio},
    }


def _state_fields(state: ComparedStep) -> dict[str, Any]:
    return {
        "engine_us": state.engine_us,
        "replayed_us": state.replayed_us,
        "missing_us": state.missing_us,
        "error": state.error,
        "kernels": [_row_fields(row) for row in state.rows],
        "missing": [_missing_fields(one) for one in state.missing],
    }


def _row_fields(row: ComparedCall) -> dict[str, Any]:
    return {
        "call": row.call.id,
        "key": call_key(row.call),
        "operator": row.call.operator,
        "signature": signature(row.call.args),
        "count": row.count,
        "share": row.share,
        "engine_us": row.engine_us,
        "replayed_us": row.replayed_us,
        "ratio": row.ratio,
        "within": row.within if row.judged else None,
        "other_kernels": row.other,
        "sample": row.replayed.sample,
        "context": row.replayed.context,
        "how": asdict(row.replayed.how),
        "warm": row.replayed.how.warm,
    }


def _missing_fields(one: MissingCall) -> dict[str, Any]:
    return {
        "name": one.name,
        "call": one.call.id if one.call else None,
        "reason": one.reason,
        "count": one.count,
        "share": one.share,
        "engine_us": one.engine_us,
        "how": asdict(one.replayed.how),
    }

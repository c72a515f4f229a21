"""`kcap replay PATH --compare-engine`: replay the profiled steps, and write a table, a figure and JSON.

The JSON has everything in the table, in microseconds of one step.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import orjson
from rich.progress import Progress, TaskID

from kcap.errors import DONE, PARTIAL, CallError
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
from kcap.replay.fidelity.replaying import FidelityRun, open_replayer, replay_kinds
from kcap.replay.fidelity.verdict import SPAN_BOUND, Fidelity, KindFidelity, ProgramTime
from kcap.replay.options import FidelityOptions
from kcap.schemas.files.jsonfile import write_json
from kcap.schemas.input_kind import detect_input
from kcap.schemas.recording.recording import Recording, load
from kcap.schemas.recording.signature import call_key, call_signature
from kcap.show.console import console
from kcap.system.worker_process import Environment


def replay_fidelity(path: Path, options: FidelityOptions, bar: Progress) -> int:
    """Compare a Recording's profiled steps with their replay; the exit code: 0 within the bounds, 3 outside."""
    if options.device == "cpu":
        raise CallError("--compare-engine compares GPU time: pass no --device cpu")
    if detect_input(path) != "recording":
        raise CallError(f"{path}: --compare-engine takes a Recording, made with --check-coverage")
    if options.output is not None:
        figure.require_matplotlib()
    recording = load(path)
    kinds = profiled_kinds(recording)
    run, environment = replay_steps(recording, kinds, options, bar)
    if options.output is not None:
        write_files(options.output, recording, run, environment)
    print_fidelity(recording, run, environment, options)
    return DONE if run.fidelity.holds else PARTIAL


def replay_steps(
    recording: Recording, kinds: list[KindSteps], options: FidelityOptions, bar: Progress
) -> tuple[FidelityRun, Environment]:
    with open_replayer(recording, options.device, options.seconds, options.timeout, options.trust) as replays, bar:
        task: TaskID = bar.add_task("replay", total=sum(len(kind.invocations) + 1 for kind in kinds))

        def show_progress(name: str) -> None:
            bar.update(task, advance=1, description=name[:40])

        return replay_kinds(recording, kinds, replays, show_progress), replays.environment


def print_fidelity(recording: Recording, run: FidelityRun, environment: Environment, options: FidelityOptions) -> None:
    """Print the table, or JSON; then the file that was written, or the command that writes it."""
    if options.as_json:
        click.echo(orjson.dumps(json_document(recording, run, environment), option=orjson.OPT_INDENT_2))
        return
    report.print_kinds(console(), run.fidelity, environment, options.rows, recording.metadata.device)
    if options.output is not None:
        click.echo(f"\nfigure: {options.output / 'fidelity.png'}")
    else:
        click.echo(f"\nas a figure: kcap replay {recording.path} --compare-engine -o {recording.path.stem}.fidelity")


def json_document(recording: Recording, run: FidelityRun, environment: Environment) -> dict[str, Any]:
    header = {"path": str(recording.path), "recorded_on": recording.metadata.device, "environment": environment}
    return {**header, **fidelity_document(run.fidelity)}


def write_files(folder: Path, recording: Recording, run: FidelityRun, environment: Environment) -> None:
    """The figure, the numbers in JSON, and the measurements behind them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "fidelity.json", json_document(recording, run, environment))
    (folder / "measurements.jsonl").write_bytes(b"".join(measurement.line() for measurement in run.measurements))
    (folder / "programs.jsonl").write_bytes(b"".join(program.line() for program in run.programs))
    figure.draw_figure(run.fidelity, folder / "fidelity.png", recording_heading(recording, environment))


def recording_heading(recording: Recording, environment: Environment) -> str:
    """Model, engine and GPU: `meta-llama/Llama-3.1-8B · vLLM 0.22.1 · NVIDIA H200`."""
    metadata = recording.metadata
    engine = f"{metadata.framework} {metadata.framework_version or ''}".strip() if metadata.framework else None
    return " · ".join(str(part) for part in (metadata.model, engine, environment.get("device_name")) if part)


BOUNDS = {"total": TOTAL_BOUND, "kernel": KERNEL_BOUND, "kernel_share": KERNEL_SHARE, "span": SPAN_BOUND}


def fidelity_document(fidelity: Fidelity) -> dict[str, Any]:
    """The JSON; times at the top are of all profiled steps."""
    return {
        "holds": fidelity.holds,
        "bounds": BOUNDS,
        "engine_us": fidelity.engine_us(),
        "replayed_us": fidelity.replayed_us(),
        "missing_us": fidelity.missing_us(),
        "error": fidelity.error,
        "total_by": dict(fidelity.by_state()),
        "kinds": [_kind_fields(kind) for kind in fidelity.kinds],
    }


def _kind_fields(kind: KindFidelity) -> dict[str, Any]:
    return {
        **asdict(kind.kind),
        "steps": kind.steps,
        "sm_mhz": kind.sm_mhz,
        "outside": list(kind.violations()),
        "holds_by": [state.state for state in kind.states_within_bounds],
        "total_by": kind.best.state,
        "states": {state.state: _state_fields(state) for state in (kind.serving, kind.in_program)},
        "span": {**asdict(kind.span), "own_us": kind.span.own_us} if kind.span else None,
        "program": {**_program_fields(kind.program), "over_span": kind.span_ratio},
    }


def _program_fields(program: ProgramTime) -> dict[str, Any]:
    return {("how" if name == "provenance" else name): value for name, value in asdict(program).items()}


def _state_fields(state: ComparedStep) -> dict[str, Any]:
    return {
        "engine_us": state.engine_us,
        "replayed_us": state.replayed_us,
        "missing_us": state.missing_us,
        "overlap_us": state.overlap_us,
        "error": state.error,
        "kernels": [_row_fields(row) for row in state.rows],
        "missing": [_missing_fields(missing) for missing in state.missing],
    }


def _row_fields(row: ComparedCall) -> dict[str, Any]:
    return {
        "call": row.call.id,
        "key": call_key(row.call),
        "operator": row.call.operator,
        "signature": call_signature(row.call),
        "count": row.count,
        "share": row.share,
        "engine_us": row.engine_us,
        "replayed_us": row.replayed_us,
        "ratio": row.ratio,
        "within": row.within if row.judged else None,
        "beside": row.beside,
        "other_kernels": row.other,
        "sample": row.replayed.sample,
        "context": row.replayed.context,
        "sequences": row.replayed.sequences,
        "how": asdict(row.replayed.provenance),
        "warm": row.replayed.provenance.warm,
    }


def _missing_fields(missing: MissingCall) -> dict[str, Any]:
    return {
        "name": missing.name,
        "call": missing.call.id if missing.call else None,
        "reason": missing.reason,
        "count": missing.count,
        "share": missing.share,
        "engine_us": missing.engine_us,
        "how": asdict(missing.replayed.provenance),
    }

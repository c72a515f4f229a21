"""`kcap report`: what a Recording holds, as one HTML file that opens anywhere."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import TypeAdapter

from kcap.bench.contents import open_contents
from kcap.commands.diff import compare_calls
from kcap.commands.gain import known_times
from kcap.commands.show import measured_rates, times_of_requests
from kcap.errors import CallError
from kcap.schemas.files.jsonfile import read_json
from kcap.schemas.input_kind import detect_input
from kcap.schemas.recording.recording import Recording, load
from kcap.schemas.recording.records import Call, Metadata
from kcap.schemas.recording.turns import FILE as TURNS_FILE
from kcap.schemas.validation.report import printable
from kcap.show.estimate import Rates, rates_of_floors, typical_rates
from kcap.system.output import write_atomically

if TYPE_CHECKING:
    from kcap.report.calls import CallDetails
    from kcap.report.document import Extras, Report, Subject
    from kcap.schemas.derive.derive import Derived
    from kcap.schemas.derive.engine_comparison import ComparedRecording
    from kcap.show.gain import CallTime

FILE = click.Path(path_type=Path, exists=True)


@click.command(epilog="\b\nExample:\n  kcap report llama.kcap --measurements llama.measurements.jsonl -o llama.html")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="HTML file to write.  [default: PATH's name, .html, here]"
)
@click.option("--measurements", type=click.Path(path_type=Path), help="Times that kcap replay PATH -o FILE measured.")
@click.option("--against", type=FILE, help="Another Recording, shown beside PATH as kcap diff compares them.")
@click.option("--judged", type=FILE, help="Output of kcap bench: its Solutions, and why some were not right.")
@click.option("--ab", "applied", type=FILE, help="Output of kcap ab -o: what Solutions gained in the engine.")
@click.option("--fidelity", type=FILE, help="Output of kcap replay --compare-engine -o: does replay add up?")
@click.option("--figures", type=click.Path(path_type=Path), help="Folder to draw each figure into, as SVG and PNG.")
@click.option("--force", is_flag=True, help="Replace the output.")
@click.option("--open", "show", is_flag=True, help="Open the file in a browser.")
def command(
    path: Path,
    output: Path | None,
    measurements: Path | None,
    against: Path | None,
    judged: Path | None,
    applied: Path | None,
    fidelity: Path | None,
    figures: Path | None,
    force: bool,
    show: bool,
) -> None:
    """Write what was recorded as one HTML file: figures and tables, with nothing to install and no network.

    PATH is a Recording; or a BackendBench trace file or a FlashInfer-Bench dataset, of which there is less to show. The
    file shows where GPU time goes by phase, each kernel with its Calls, shapes, Samples and source, the roofline, how
    large batches were, one profiled step, the turns of an agent trace, and what is not known. Counts and times are
    those of kcap show and kcap gain. It holds what PATH holds, sources of kernels and kept texts among it: share it as
    you would share that.
    """
    output = output or Path(path.resolve().with_suffix(".html").name)
    if output.exists() and (output.is_dir() or not force):
        raise CallError(f"{output}: {'is a directory' if output.is_dir() else 'already exists: pass --force'}")
    from kcap.report.page import page

    if measurements is not None and detect_input(path) != "recording":
        raise CallError(f"{path} is no Recording: --measurements are of one")
    extras = gather_extras(path, measurements, against, judged, applied, fidelity)
    report, details = (
        gather_dataset(path, extras) if detect_input(path) == "dataset" else gather(path, measurements, extras)
    )
    if figures is not None:
        _draw(report, figures, fidelity)
    content = page(report, details)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, content)
    click.echo(f"{output}: {len(content) / 1e6:,.1f} MB", err=True)
    if show:
        click.launch(output.resolve().as_uri())
    else:
        click.echo(f"Next: open {shlex.quote(str(output))} in a browser", err=True)


def _draw(report: Report, figures: Path, fidelity: Path | None) -> None:
    from kcap.report.figures import draw_figures

    files = draw_figures(report, figures, fidelity)
    click.echo(f"{figures}: {', '.join(file.name for file in files) or 'nothing that can be drawn'}", err=True)


def gather(path: Path, measurements: Path | None, extras: Extras) -> tuple[Report, CallDetails]:
    """What there is to show of a Recording or a trace file."""
    from kcap.report.agents import agent_trace
    from kcap.report.document import make_report

    subject = open_subject(path)
    recording = subject.recording
    if recording is None:
        return make_report(subject, None, None, extras)
    known = known_times(recording, measurements)
    if (recording.path / TURNS_FILE).exists():
        extras = replace(extras, agents=agent_trace(recording, *times_of_requests(recording, measurements)))
    return make_report(subject, known, rates_of(recording, measurements), extras)


def gather_dataset(path: Path, extras: Extras) -> tuple[Report, CallDetails]:
    """What there is to show of a dataset."""
    from kcap.report.dataset import report_of_dataset
    from kcap.schemas.flashinfer.dataset import Dataset

    return report_of_dataset(Dataset.load(path), printable(path.name), extras)


def open_subject(path: Path) -> Subject:
    """The Recording or the trace file at `path`."""
    from kcap.report.document import Subject

    name = printable(path.name)
    if detect_input(path) == "recording":
        recording = load(path)
        return Subject("recording", name, recording.calls, recording.metadata, recording, derive_if_possible(recording))
    from kcap.replay.source import calls_of_trace

    return Subject("trace", name, calls_of_trace(path, None), Metadata())


def derive_if_possible(recording: Recording) -> Derived | None:
    """The Recording's Definitions; None without torch, which they need."""
    if importlib.util.find_spec("torch") is None:
        return None
    from kcap.schemas.derive.derive import derive

    return derive(recording)


def rates_of(recording: Recording, measurements: Path | None) -> Rates:
    """Of the device, where kcap replay measured it on this machine, else by the floors of `measurements`; where these
    do not tell, typical ones."""
    from kcap.schemas.results.measurement import read_measurements

    if (rates := measured_rates(recording)) is not None:
        return rates
    if measurements is not None:
        source = f"by the floors in {measurements.name}, whose margin is in them"
        rates = rates_of_floors(read_measurements(measurements), source)
    return rates or typical_rates(recording)


def gather_extras(
    path: Path, measurements: Path | None, against: Path | None, judged: Path | None, applied: Path | None,
    fidelity: Path | None,
) -> Extras:  # fmt: skip
    """What the other options name; CallError where it is not what they take."""
    from kcap.report.document import Extras
    from kcap.report.judged import read_judged
    from kcap.schemas.results.applied import read_applied

    return Extras(
        against=compare(path, measurements, against) if against else None,
        judged=read_judged(judged) if judged else None,
        applied=read_applied(applied).model_dump(mode="json") if applied else None,
        fidelity=read_fidelity(fidelity) if fidelity else None,
    )


def compare(path: Path, measurements: Path | None, against: Path) -> dict[str, Any]:
    """The document of `kcap diff`: of two Recordings by family, with times where both have them, else by Call."""
    names = {"a": printable(path.name), "b": printable(against.name)}
    both_recordings = {detect_input(one) for one in (path, against)} == {"recording"}
    if not both_recordings or importlib.util.find_spec("torch") is None:
        contents = [open_contents(one, allow_truncated=True) for one in (path, against)]
        return {**names, **compare_calls(*contents).as_json()}
    from kcap.schemas.derive.engine_comparison import compare_engines

    recordings = [load(path), load(against)]
    times = [known_times(recordings[0], measurements), known_times(recordings[1], None)]
    timed = [known and known[0] for known in times] if all(times) else [None, None]
    sides = [_compared(one, of_one) for one, of_one in zip(recordings, timed, strict=True)]
    return {**names, **compare_engines(*sides).as_json()}


def _compared(recording: Recording, times: Mapping[int, CallTime] | None) -> ComparedRecording:
    from kcap.schemas.derive.engine_comparison import ComparedRecording

    if times is None:
        return ComparedRecording(recording.calls, recording.metadata, None, recording)

    def time(call: Call, phase: str) -> float | None:
        return times[call.id].us.get(phase) if call.id in times else None

    return ComparedRecording(recording.calls, recording.metadata, time, recording)


def read_fidelity(path: Path) -> dict[str, Any]:
    """The document that `kcap replay --compare-engine -o DIR` writes; `path` is DIR or the file in it."""
    file = path / "fidelity.json" if path.is_dir() else path
    if not file.is_file():
        raise CallError(f"{path}: no output of kcap replay --compare-engine, which writes fidelity.json there")
    document: dict[str, Any] = read_json(file, TypeAdapter(dict[str, Any]))
    if not document.get("kinds"):
        raise CallError(f"{file}: no document of kcap replay --compare-engine")
    return document

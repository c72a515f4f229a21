"""`kcap replay`: rebuild recorded calls, or a dataset's Workloads, and time them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import click
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kcap.errors import DONE, FAILED, PARTIAL, CallError
from kcap.replay import report
from kcap.replay.budget import seconds_of
from kcap.replay.fidelity.options import Options
from kcap.replay.job import Choice, Request, Source
from kcap.replay.pool import Worker
from kcap.replay.program.options import ProgramOptions
from kcap.replay.results import Results, Row
from kcap.replay.roofline.judging import Rooflines
from kcap.replay.source import open_source
from kcap.schemas.measurement import CACHES, Measurement
from kcap.schemas.recording import PHASES, Phase


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--device", help="cuda, cuda:N or cpu.  [default: what it was recorded on]")
@click.option("--op", "globs", multiple=True, metavar="GLOB", help="Only operators (Definitions) that match.")
@click.option("--phase", type=click.Choice(PHASES), help="Only what ran in this phase.")
@click.option("--top", type=click.IntRange(min=1), help="Only the N most frequent calls.")
@click.option("--rows", type=click.IntRange(min=1), default=40, show_default=True, help="Rows of the table.")
@click.option("--all", "views", is_flag=True, help="Views and allocations too.")
@click.option("--keep-going", is_flag=True, help="Skip and count the bad lines of a trace file.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.001),
    default=0.1,
    show_default=True,
    help="Sampling per call or Program; a fifth of it for calls that hardly count.",
)
@click.option(
    "--timeout", type=click.FloatRange(min=0.1), default=60, show_default=True, help="Seconds per call at most."
)
@click.option(
    "--cache",
    type=click.Choice(CACHES),
    default="serving",
    show_default=True,
    help="On a GPU: none of the inputs in the caches, all that fits, or activations but no weights and KV caches.",
)
@click.option("--kernels", is_flag=True, help="On a GPU: kernel durations by the profiler, too, in a pass of its own.")
@click.option("--program", is_flag=True, help="Whole steps and captured graphs, their kernels in their order.")
@click.option("--step", type=click.IntRange(min=0), metavar="ID", help="With --program: the one of this recorded step.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: torch's]")
@click.option("--trust", is_flag=True, help="Run code of PATH that you did not record here yourself.")
@click.option("--fidelity", is_flag=True, help="Hold the replay against the GPU time of --check-coverage's steps.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "-o", "output", type=click.Path(path_type=Path), help="Write a measurement a line (--fidelity: a folder)."
)
@click.option("--force", is_flag=True, help="Overwrite the output.")
def command(
    path: Path,
    device: str | None,
    globs: tuple[str, ...],
    phase: str | None,
    top: int | None,
    rows: int,
    views: bool,
    keep_going: bool,
    seconds: float,
    timeout: float,
    cache: str,
    kernels: bool,
    program: bool,
    step: int | None,
    threads: int | None,
    trust: bool,
    fidelity: bool,
    as_json: bool,
    output: Path | None,
    force: bool,
) -> int:
    """Rebuild the recorded kernels' arguments and time each, on all its Samples.

    PATH is a Recording, a BackendBench trace file or parquet, or a FlashInfer-Bench dataset, of which each Definition's
    reference is timed on each of its Workloads: that is code from elsewhere, which runs only with --trust. Each kernel
    runs in a child process with a time limit. Exit code: 0 all replayed, 1 a kernel failed, 3 some were skipped.

    With --program: of each phase, use of graphs and padded size the most frequent step, or the one of --step, as a
    whole, in one CUDA graph where that can be. With --fidelity: each kernel and the whole of the steps that kcap record
    --check-coverage profiled, held against the engine's own GPU time; 3: outside the bounds.

    \b
    Example:
      kcap replay llama.kcap --phase decode -o llama.measurements.jsonl
      kcap replay llama.kcap --cache cold --kernels --op '*rms_norm*'
      kcap replay llama.kcap --program --phase decode -o llama.programs.jsonl
      kcap replay flashinfer-trace --trust --op 'rmsnorm*'
      kcap replay llama.kcap --fidelity -o llama.fidelity
    """
    check_options(device, output, force)
    if fidelity:
        more = {"--op": globs, "--all": views, "--keep-going": keep_going, "--program": program, "--step": step}
        refuse({"--phase": phase, "--top": top, "--cache": cache != "serving", **more}, "--fidelity")
        return held_against_engine(path, Options(device, seconds, timeout, trust, rows, as_json, output))
    if program or step is not None:
        refuse({"--op": globs, "--all": views, "--keep-going": keep_going}, "--program")
        chosen = ProgramOptions(
            step, cast("Phase | None", phase), top, seconds, timeout, device, threads, trust, rows, as_json
        )
        return whole_programs(path, chosen, output)
    source = open_source(path, Choice(globs, cast("Phase | None", phase), top, views), keep_going, trust)
    session = {**source.session, "device": device, "threads": threads, "cache": cache, "kernels": kernels}
    began = time.monotonic()
    with opened(output) as file, Worker(session, source.module) as worker:
        started = time.monotonic()
        rooflines = Rooflines()
        results = replay(source, worker, seconds, timeout, file, rooflines)
        environment = worker.environment
    if as_json:
        seconds_taken = {"start": started - began, "replay": time.monotonic() - started}
        there = {"environment": environment, "ceilings": rooflines.as_json(), "seconds": seconds_taken}
        summary = {"path": str(path), **there, "bad_lines": source.bad_lines, **results.as_json()}
        click.echo(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
    else:
        report.show(report.console(), results, environment, rows)
        for line in rooflines.lines():
            click.echo(line)
        say_next(source, output)
    return exit_code(results, source)


def check_options(device: str | None, output: Path | None, force: bool) -> None:
    if device is not None and device != "cpu" and not (device == "cuda" or device.removeprefix("cuda:").isdecimal()):
        raise CallError(f"--device {device}: not a device that kcap knows: cuda, cuda:N or cpu")
    if output is not None and output.exists() and not force:
        raise CallError(f"{output}: already exists: pass --force")


def refuse(given: Mapping[str, object], beside: str) -> None:
    """CallError for the options in `given` that were passed, which mean nothing beside another one."""
    if passed := [name for name, value in given.items() if value is not None and value is not False and value != ()]:
        raise CallError(f"{beside} replays what it has to: leave out {', '.join(passed)}")


def held_against_engine(path: Path, options: Options) -> int:
    from kcap.replay.fidelity.command import fidelity

    return fidelity(path, options, progress())


def whole_programs(path: Path, options: ProgramOptions, output: Path | None) -> int:
    from kcap.replay.program.command import replay_programs

    with opened(output) as file:
        return replay_programs(path, options, file, progress())


@contextmanager
def opened(output: Path | None) -> Iterator[BinaryIO | None]:
    """The output file, written line by line so that an interrupted replay keeps what it measured."""
    if output is None:
        yield None
        return
    with output.open("wb", buffering=0) as file:
        yield file


def replay(
    source: Source, worker: Worker, seconds: float, timeout: float, file: BinaryIO | None, rooflines: Rooflines
) -> Results:
    """Replay every job; a measurement goes to `file` as soon as it is there."""
    results = Results()
    with progress() as bar:
        task = bar.add_task("replay", total=len(source.jobs))
        for job, share in zip(source.jobs, seconds_of(source.jobs, seconds), strict=True):
            bar.update(task, description=job.name[:40])
            row = Row(job, [rooflines.judge(measure(one, worker, timeout)) for one in job.requests(share)])
            results.rows.append(row)
            if file:
                file.writelines(measurement.line() for measurement in row.measurements)
            bar.advance(task)
    return results


def progress() -> Progress:
    columns = (
        TextColumn("{task.description:<40}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def measure(request: Request, worker: Worker, timeout: float) -> Measurement:
    """Have the worker make one measurement."""
    answer = worker.run(request.body, timeout)
    return Measurement.model_validate({**worker.environment, **answer, **request.told})


def say_next(source: Source, output: Path | None) -> None:
    if source.bad_lines:
        click.echo(f"{source.bad_lines} bad lines of {source.path} were skipped (--keep-going)")
    if output is None:
        click.echo(f"\nkeep the measurements: kcap replay {source.path} -o {source.path.stem}.measurements.jsonl")
    else:
        click.echo(f"\nmeasurements: {output}\nwhat ran: kcap show {source.path}")


def exit_code(results: Results, source: Source) -> int:
    if results.of("failed"):
        return FAILED
    return PARTIAL if results.of("skipped") or source.bad_lines else DONE

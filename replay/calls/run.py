"""`kcap replay PATH`: every Call, or every Workload of a dataset, by itself."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import BinaryIO

import click
import orjson

from kcap.errors import DONE, FAILED, PARTIAL
from kcap.replay.calls import report
from kcap.replay.calls.results import Results, Row
from kcap.replay.group.workers import GroupedWorker
from kcap.replay.jobs import ReplaySession, Request, Source, sampling_seconds
from kcap.replay.options import CallOptions
from kcap.replay.roofline.floor import Rooflines
from kcap.replay.source import open_source
from kcap.schemas.results.measurement import Measurement
from kcap.show.console import console
from kcap.show.progress import opened, progress
from kcap.system.worker_process import Environment, Worker


def replay_calls(path: Path, options: CallOptions, output: Path | None) -> int:
    """Replay and print the chosen Calls or Workloads of `path`; the exit code."""
    source = open_source(path, options.choice, options.keep_going, options.trust)
    session: ReplaySession = {
        **source.session,
        "device": options.device,
        "threads": options.threads,
        "cache": options.cache,
        "kernels": options.kernel_durations,
    }
    began = time.monotonic()
    rooflines = Rooflines()
    with GroupedWorker(session, source.module) as worker, opened(output) as file:
        started = time.monotonic()
        results = measure_jobs(source, worker, options, file, rooflines)
        environment = worker.environment
    if environment["device"] == "cpu" and options.cache == "cold":
        click.echo(f"kcap: --cache {options.cache} is of a GPU: on a CPU what is timed is in its caches", err=True)
    if options.as_json:
        seconds = {"start": started - began, "replay": time.monotonic() - started}
        machine = {"environment": environment, "ceilings": rooflines.as_json(), "seconds": seconds}
        document = {"path": str(path), **machine, "bad_lines": source.bad_lines, **results.as_json()}
        click.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    else:
        print_results(source, results, environment, rooflines, options.rows)
        print_next_step(source, options, output)
    return exit_code_of(results, source)


def measure_jobs(
    source: Source, worker: Worker, options: CallOptions, file: BinaryIO | None, rooflines: Rooflines
) -> Results:
    """Replay every job; write each measurement to `file` at once, so that an interrupted replay keeps it."""
    results = Results()
    with progress() as bar:
        task = bar.add_task("replay", total=len(source.jobs))
        for job, seconds in zip(source.jobs, sampling_seconds(source.jobs, options.seconds), strict=True):
            bar.update(task, description=job.name[:40])
            measurements = (measure(request, worker, options.timeout) for request in job.requests(seconds))
            row = Row(job, [rooflines.judge(measurement) for measurement in measurements])
            results.rows.append(row)
            if file:
                file.writelines(measurement.line() for measurement in row.measurements)
            bar.advance(task)
    return results


def measure(request: Request, worker: Worker, timeout: float) -> Measurement:
    answer = worker.run(request.body, timeout)
    return Measurement.model_validate({**worker.environment, **answer, **request.labels})


def print_results(source: Source, results: Results, environment: Environment, rooflines: Rooflines, rows: int) -> None:
    report.print_tables(console(), results, environment, rows)
    for line in rooflines.lines():
        click.echo(line)
    if source.bad_lines:
        click.echo(f"{source.bad_lines} bad lines of {source.path} were skipped (--keep-going)")


def print_next_step(source: Source, options: CallOptions, output: Path | None) -> None:
    path = str(source.path)
    words = ["kcap", "show", path]
    if output is None:
        device = [] if options.device is None else ["--device", options.device]
        trust = ["--trust"] if options.trust else []
        words = ["kcap", "replay", path, *device, *trust, "-o", f"{source.path.resolve().stem}.measurements.jsonl"]
    else:
        click.echo(f"\nMeasurements: {output}", err=True)
    click.echo(f"Next: {shlex.join(words)}", err=True)


def exit_code_of(results: Results, source: Source) -> int:
    """1: a kernel failed; 3: some were skipped, on one of their Samples at least."""
    if results.reasons("failed"):
        return FAILED
    return PARTIAL if results.reasons("skipped") or source.bad_lines else DONE

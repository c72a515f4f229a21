"""`kcap replay PATH`: every call, or every Workload of a dataset, by itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, BinaryIO

import click
import orjson

from kcap.errors import DONE, FAILED, PARTIAL
from kcap.replay.calls import report
from kcap.replay.calls.results import Results, Row
from kcap.replay.jobs import Request, Source, sampling_seconds
from kcap.replay.options import EachOptions
from kcap.replay.roofline.floor import Rooflines
from kcap.replay.source import open_source
from kcap.schemas.results.measurement import Measurement
from kcap.show.progress import opened, progress
from kcap.system.worker_process import Worker


def replay_each(path: Path, options: EachOptions, output: Path | None) -> int:
    """Replay and print what is chosen of `path`; the exit code."""
    source = open_source(path, options.choice, options.keep_going, options.trust)
    asked = {"device": options.device, "threads": options.threads, "cache": options.cache, "kernels": options.kernels}
    began = time.monotonic()
    rooflines = Rooflines()
    with Worker({**source.session, **asked}, source.module) as worker, opened(output) as file:
        started = time.monotonic()
        results = measure_jobs(source, worker, options, file, rooflines)
        environment = worker.environment
    if options.as_json:
        seconds = {"start": started - began, "replay": time.monotonic() - started}
        there = {"environment": environment, "ceilings": rooflines.as_json(), "seconds": seconds}
        summary = {"path": str(path), **there, "bad_lines": source.bad_lines, **results.as_json()}
        click.echo(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
    else:
        print_results(source, results, environment, rooflines, options.rows)
        print_next_step(source, output)
    return exit_code_of(results, source)


def measure_jobs(
    source: Source, worker: Worker, options: EachOptions, file: BinaryIO | None, rooflines: Rooflines
) -> Results:
    """Replay every job; a measurement goes to `file` as soon as it is there."""
    results = Results()
    with progress() as bar:
        task = bar.add_task("replay", total=len(source.jobs))
        for job, share in zip(source.jobs, sampling_seconds(source.jobs, options.seconds), strict=True):
            bar.update(task, description=job.name[:40])
            asked = job.requests(share)
            row = Row(job, [rooflines.judge(measure_request(one, worker, options.timeout)) for one in asked])
            results.rows.append(row)
            if file:
                file.writelines(measurement.line() for measurement in row.measurements)
            bar.advance(task)
    return results


def measure_request(request: Request, worker: Worker, timeout: float) -> Measurement:
    """Have the worker make one measurement."""
    answer = worker.run(request.body, timeout)
    return Measurement.model_validate({**worker.environment, **answer, **request.told})


def print_results(
    source: Source, results: Results, environment: dict[str, Any], rooflines: Rooflines, rows: int
) -> None:
    report.print_tables(report.console(), results, environment, rows)
    for line in rooflines.lines():
        click.echo(line)
    if source.bad_lines:
        click.echo(f"{source.bad_lines} bad lines of {source.path} were skipped (--keep-going)")


def print_next_step(source: Source, output: Path | None) -> None:
    if output is None:
        click.echo(f"\nkeep the measurements: kcap replay {source.path} -o {source.path.stem}.measurements.jsonl")
    else:
        click.echo(f"\nmeasurements: {output}\nwhat ran: kcap show {source.path}")


def exit_code_of(results: Results, source: Source) -> int:
    """1: a kernel failed; 3: some were skipped."""
    if results.of("failed"):
        return FAILED
    return PARTIAL if results.of("skipped") or source.bad_lines else DONE

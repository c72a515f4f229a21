"""`kcap replay PATH`: every call, or every Workload of a dataset, by itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import click
import orjson

from kcap.errors import DONE, FAILED, PARTIAL
from kcap.replay import report
from kcap.replay.budget import seconds_of
from kcap.replay.job import Choice, Request, Source
from kcap.replay.output import opened, progress
from kcap.replay.pool import Worker
from kcap.replay.results import Results, Row
from kcap.replay.roofline.judging import Rooflines
from kcap.replay.source import open_source
from kcap.schemas.measurement import Measurement


@dataclass(frozen=True)
class EachOptions:
    """`seconds`, `timeout`: of sampling a call, and for it at most. `device` None: what it was recorded on."""

    choice: Choice
    keep_going: bool
    seconds: float
    timeout: float
    device: str | None
    cache: str
    kernels: bool
    threads: int | None
    trust: bool
    rows: int
    as_json: bool


def replay_each(path: Path, options: EachOptions, output: Path | None) -> int:
    """Replay and print what is chosen of `path`; the exit code."""
    source = open_source(path, options.choice, options.keep_going, options.trust)
    asked = {"device": options.device, "threads": options.threads, "cache": options.cache, "kernels": options.kernels}
    began = time.monotonic()
    rooflines = Rooflines()
    with Worker({**source.session, **asked}, source.module) as worker, opened(output) as file:
        started = time.monotonic()
        results = measured(source, worker, options, file, rooflines)
        environment = worker.environment
    if options.as_json:
        seconds = {"start": started - began, "replay": time.monotonic() - started}
        there = {"environment": environment, "ceilings": rooflines.as_json(), "seconds": seconds}
        summary = {"path": str(path), **there, "bad_lines": source.bad_lines, **results.as_json()}
        click.echo(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
    else:
        show(source, results, environment, rooflines, options.rows)
        say_next(source, output)
    return exit_code(results, source)


def measured(
    source: Source, worker: Worker, options: EachOptions, file: BinaryIO | None, rooflines: Rooflines
) -> Results:
    """Replay every job; a measurement goes to `file` as soon as it is there."""
    results = Results()
    with progress() as bar:
        task = bar.add_task("replay", total=len(source.jobs))
        for job, share in zip(source.jobs, seconds_of(source.jobs, options.seconds), strict=True):
            bar.update(task, description=job.name[:40])
            asked = job.requests(share)
            row = Row(job, [rooflines.judge(measure(one, worker, options.timeout)) for one in asked])
            results.rows.append(row)
            if file:
                file.writelines(measurement.line() for measurement in row.measurements)
            bar.advance(task)
    return results


def measure(request: Request, worker: Worker, timeout: float) -> Measurement:
    """Have the worker make one measurement."""
    answer = worker.run(request.body, timeout)
    return Measurement.model_validate({**worker.environment, **answer, **request.told})


def show(source: Source, results: Results, environment: dict[str, Any], rooflines: Rooflines, rows: int) -> None:
    report.show(report.console(), results, environment, rows)
    for line in rooflines.lines():
        click.echo(line)
    if source.bad_lines:
        click.echo(f"{source.bad_lines} bad lines of {source.path} were skipped (--keep-going)")


def say_next(source: Source, output: Path | None) -> None:
    if output is None:
        click.echo(f"\nkeep the measurements: kcap replay {source.path} -o {source.path.stem}.measurements.jsonl")
    else:
        click.echo(f"\nmeasurements: {output}\nwhat ran: kcap show {source.path}")


def exit_code(results: Results, source: Source) -> int:
    """1: a kernel failed; 3: some were skipped."""
    if results.of("failed"):
        return FAILED
    return PARTIAL if results.of("skipped") or source.bad_lines else DONE

"""`kcap replay PATH --program`: whole steps and captured graphs, each one's kernels in their order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import orjson
from rich.progress import Progress

from kcap.errors import DONE, FAILED, PARTIAL, CallError
from kcap.replay.calls.report import console
from kcap.replay.jobs import CallJob, SampleGroup
from kcap.replay.options import ProgramOptions
from kcap.replay.program import report
from kcap.replay.program.choose import most_frequent_programs, program_of_step
from kcap.replay.program.job import LEAST_TIMEOUT_S, AloneResult, ProgramJob, program_job
from kcap.replay.source import home_device
from kcap.schemas.input_kind import detect_input
from kcap.schemas.recording.recording import Call, Recording, load
from kcap.schemas.results.measurement import ProgramMeasurement
from kcap.show.progress import opened
from kcap.system.worker_process import Worker


def replay_programs(path: Path, options: ProgramOptions, output: Path | None, bar: Progress) -> int:
    """Replay and print Programs of the Recording `path`; a measurement goes to `output` as soon as it is there.

    The exit code: 0 all of them whole, 1 one failed, 3 one lacks kernels.
    """
    jobs = chosen_jobs(path, options)
    session = program_session(jobs[0].recording, options)
    measured = []
    with Worker(session) as worker, opened(output) as file, bar:
        for one in replay_jobs(jobs, worker, options, bar):
            measured.append(one)
            if file:
                file.write(one.line())
        environment = worker.environment
    print_measured(path, measured, environment, options)
    if any(one.status == "failed" for one in measured):
        return FAILED
    return PARTIAL if any(one.partial or one.status != "ok" for one in measured) else DONE


def chosen_jobs(path: Path, options: ProgramOptions) -> list[ProgramJob]:
    if detect_input(path) != "recording":
        raise CallError(f"{path}: --program takes a Recording: only that knows in which order kernels ran")
    recording = load(path)
    if options.step is not None:
        return [program_job(recording, program_of_step(recording, options.step))]
    return [program_job(recording, one) for one in most_frequent_programs(recording, options.phase)[: options.top]]


def program_session(recording: Recording, options: ProgramOptions) -> dict[str, Any]:
    return {
        "home": home_device(recording.calls),
        "root": str(recording.path.resolve()),
        "namespaces": sorted({call.namespace for call in recording.kernels()}),
        "trust": options.trust,
        "device": options.device,
        "threads": options.threads,
        "cache": "warm",
        "kernels": True,
    }


def replay_jobs(
    jobs: list[ProgramJob], worker: Worker, options: ProgramOptions, bar: Progress
) -> Iterator[ProgramMeasurement]:
    """Each Program's measurement; its Calls are tried alone first, each once on one Sample."""
    known: dict[tuple[int, int | None], AloneResult] = {}
    task = bar.add_task("program", total=sum(len(job.counts) + 1 for job in jobs))
    for job in jobs:
        for call in job.calls:
            bar.update(task, advance=1, description=call.operator[:40])
            place = call.id, job.samples.get(call.id)
            if place not in known:
                known[place] = replay_alone(call, place[1], job.recording, worker, options.timeout)
        bar.update(task, advance=1, description=f"program {job.chosen.program.id}")
        alone = {number: known[number, job.samples.get(number)] for number in job.counts}
        request = job.request(alone, options.seconds)
        answer = worker.run(request.body, max(options.timeout, LEAST_TIMEOUT_S))
        yield job.measured(alone, answer, worker.environment)


def replay_alone(call: Call, line: int | None, recording: Recording, worker: Worker, timeout: float) -> AloneResult:
    """What is known of `call` once it ran alone on the Sample of this line."""
    sample = None if line is None else recording.samples[line]
    (request,) = CallJob({}, call, [SampleGroup(sample, line)]).requests(0.0)
    return AloneResult.of(worker.run({**request.body, "seconds": 0.0}, timeout))


def print_measured(
    path: Path, measured: list[ProgramMeasurement], environment: dict[str, Any], options: ProgramOptions
) -> None:
    if options.as_json:
        programs = [one.model_dump(mode="json") for one in measured]
        known = {"path": str(path), "environment": environment, "programs": programs}
        click.echo(orjson.dumps(known, option=orjson.OPT_INDENT_2))
        return
    out = console()
    report.print_programs(out, measured, environment, options.rows)
    click.echo(f"\nwhat ran: kcap show {path}")

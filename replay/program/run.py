"""`kcap replay PATH --program`: whole steps and captured graphs, with their kernels in order."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import orjson
from rich.progress import Progress

from kcap.errors import DONE, FAILED, PARTIAL, CallError
from kcap.replay.group.workers import GroupedWorker
from kcap.replay.jobs import REPLAY_WORKER, CallJob, ReplaySession, SampleGroup
from kcap.replay.options import ProgramOptions
from kcap.replay.program import report
from kcap.replay.program.choose import most_frequent_programs, program_of_step
from kcap.replay.program.job import MIN_TIMEOUT_S, ProgramJob, StandaloneResult, program_job
from kcap.replay.source import replay_session
from kcap.schemas.input_kind import detect_input
from kcap.schemas.recording.recording import Call, Recording, load
from kcap.schemas.results.measurement import ProgramMeasurement
from kcap.show.console import console
from kcap.show.progress import opened
from kcap.system.worker_process import Environment, Worker


def replay_programs(path: Path, options: ProgramOptions, output: Path | None, bar: Progress) -> int:
    """Replay and print Programs of the Recording `path`; write each measurement to `output` at once.

    The exit code: 0 all of them are complete, 1 one failed, 3 one lacks kernels.
    """
    jobs = chosen_jobs(path, options)
    recording = jobs[0].recording
    session: ReplaySession = {
        **replay_session(recording, recording.calls, recording.kernels(), options.trust),
        "device": options.device,
        "threads": options.threads,
        "cache": "warm",
        "kernels": True,
    }
    measurements = []
    with GroupedWorker(session, REPLAY_WORKER) as worker, opened(output) as file, bar:
        for measurement in replay_jobs(jobs, worker, options, bar):
            measurements.append(measurement)
            if file:
                file.write(measurement.line())
        environment = worker.environment
    print_measurements(path, measurements, environment, options)
    if any(measurement.status == "failed" for measurement in measurements):
        return FAILED
    return PARTIAL if any(program.partial or program.status != "ok" for program in measurements) else DONE


def chosen_jobs(path: Path, options: ProgramOptions) -> list[ProgramJob]:
    if detect_input(path) != "recording":
        raise CallError(f"{path}: --program takes a Recording: only that knows in which order kernels ran")
    recording = load(path)
    if options.step is not None:
        return [program_job(recording, program_of_step(recording, options.step))]
    programs = most_frequent_programs(recording, options.phase)
    return [program_job(recording, chosen) for chosen in programs[: options.top]]


def replay_jobs(
    jobs: list[ProgramJob], worker: Worker, options: ProgramOptions, bar: Progress
) -> Iterator[ProgramMeasurement]:
    """Each Program's measurement. Each of its Calls first runs alone, once for each Sample."""
    results: dict[tuple[int, int | None], StandaloneResult] = {}  # by Call and the line of its Sample
    task = bar.add_task("program", total=sum(len(job.counts) + 1 for job in jobs))
    for job in jobs:
        for call in job.calls:
            bar.update(task, advance=1, description=call.operator[:40])
            line = job.samples.get(call.id)
            if (call.id, line) not in results:
                results[call.id, line] = replay_alone(call, line, job.recording, worker, options.timeout)
        bar.update(task, advance=1, description=f"program {job.chosen.program.id}")
        standalone = {call: results[call, job.samples.get(call)] for call in job.counts}
        request = job.request(standalone, options.seconds)
        answer = worker.run(request, max(options.timeout, MIN_TIMEOUT_S))
        yield job.measurement(standalone, answer, worker.environment)


def replay_alone(
    call: Call, line: int | None, recording: Recording, worker: Worker, timeout: float
) -> StandaloneResult:
    sample = None if line is None else recording.samples[line]
    (request,) = CallJob({}, call, [SampleGroup(sample, line)]).requests(0.0)
    return StandaloneResult.of(worker.run({**request.body, "seconds": 0.0}, timeout))


def print_measurements(
    path: Path, measurements: list[ProgramMeasurement], environment: Environment, options: ProgramOptions
) -> None:
    if options.as_json:
        programs = [measurement.model_dump(mode="json") for measurement in measurements]
        document = {"path": str(path), "environment": environment, "programs": programs}
        click.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2))
        return
    report.print_programs(console(), measurements, environment, options.rows)
    click.echo(f"Next: kcap show {shlex.quote(str(path))}", err=True)

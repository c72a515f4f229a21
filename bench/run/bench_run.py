"""One run of `kcap bench`: what is left to judge is judged, and every Outcome is on disk as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from difflib import get_close_matches

import click

from kcap.bench.contents import CheckTarget
from kcap.bench.run import foreign_formats, output
from kcap.bench.run.executors import SlotRequest, find_executor
from kcap.bench.run.executors.common.dispatcher import AskedAgain, Dispatcher, LostSlot, WorkUnit, queue_by_definition
from kcap.bench.run.executors.local import choose_device
from kcap.bench.run.options import Options
from kcap.bench.run.output import KeptOutcomes, solution_key
from kcap.bench.run.subject import PreparedDataset, Subject, open_subject
from kcap.bench.run.summary.baseline import Measured, measured_baseline
from kcap.bench.solutions import FoundSolution, RefusedSolution, read_solutions
from kcap.errors import CallError
from kcap.replay.datasets.workloads import UNCOUNTED_PHASES, WorkloadWeights, workload_weights
from kcap.schemas.flashinfer.definition import Workload
from kcap.schemas.results.bench_run import RUN_FILE, RefusedFile, RunRecord, SolutionFile
from kcap.schemas.results.measurement import Measurement, read_measurements
from kcap.schemas.results.outcome import Outcome
from kcap.show.progress import progress
from kcap.version import __version__

AddOutcome = Callable[[Outcome], object]


@dataclass(frozen=True)
class BenchRun:
    """`workloads`: by Definition, those to judge on. `device`: cpu, cuda or cuda:N. `measured`: by `measurements`."""

    options: Options
    subject: Subject
    solutions: Sequence[FoundSolution]
    refused: Sequence[RefusedSolution]
    workloads: Mapping[str, Sequence[Workload]]
    weights: WorkloadWeights
    device: str
    measurements: Sequence[Measurement]
    measured: Measured | None

    @property
    def record(self) -> RunRecord:
        return RunRecord(
            kcap=__version__,
            path=str(self.options.path),
            identity=self.subject.identity,
            blobs=self.subject.blobs({found.solution.definition for found in self.solutions}),
            device=self.device,
            threads=self.options.threads,
            options=self.options.as_fields(),
            solutions={
                found.solution.key: SolutionFile(file=str(found.file), sha256=found.solution.sha256)
                for found in self.solutions
            },
            refused=[RefusedFile(file=str(file.file), reason=file.reason) for file in self.refused],
        )

    def begin(self) -> tuple[RunRecord, KeptOutcomes]:
        """bench.json written, and what an earlier run judged that need not be judged again.

        CallError if that was on something else, or elsewhere.
        """
        folder, record = self.options.output, self.record
        if not (folder / RUN_FILE).is_file():
            output.write_run(folder, record)
            return record, KeptOutcomes([])
        before = output.read_run(folder)
        output.check_same_run(folder, before, record)
        kept = output.keep_outcomes(folder, _still_valid(before, record))
        record = record.after(before)
        output.write_run(folder, record)
        return record, kept

    def units(self, done: Iterable[Outcome]) -> list[WorkUnit]:
        """What is left: each Solution with the Workloads that it has no Outcome on."""
        judged = {(*solution_key(outcome), outcome.workload) for outcome in done}
        return [unit for found in self.solutions if (unit := self._unit(found, judged)).workloads]

    def _unit(self, found: FoundSolution, judged: set[tuple[str, str, str, str]]) -> WorkUnit:
        solution = found.solution
        key = (solution.definition, solution.author, solution.name)
        remaining = tuple(
            workload for workload in self.workloads[solution.definition] if (*key, workload.uuid) not in judged
        )
        return WorkUnit(str(found.file), solution, self.subject.definitions[solution.definition], remaining)

    def prepare(self, names: set[str]) -> PreparedDataset:
        """Make what judges read of the Definitions `names`."""
        return self.subject.prepare(names, self.options.output, CheckTarget(self.device, self.options.trust))

    def judge(
        self, record: RunRecord, units: Sequence[WorkUnit], prepared: PreparedDataset
    ) -> Generator[Outcome, None, None]:
        """Judge `units`; an Outcome is on disk when it is given. Closing the iterator stops the judges."""
        sound = [unit for unit in units if unit.definition.name not in prepared.faults]
        with output.outcome_writer(self.options.output) as add:
            for unit in units:
                if (fault := prepared.faults.get(unit.definition.name)) is not None:
                    for outcome in _not_judged(unit, fault):
                        yield self._keep(outcome, add)
            if sound:
                yield from self._judge(record, sound, prepared, add)

    def _judge(
        self, record: RunRecord, units: Sequence[WorkUnit], prepared: PreparedDataset, add: AddOutcome
    ) -> Iterator[Outcome]:
        options = self.options
        request = SlotRequest(self.device, options.session(prepared.root), len(units))
        with (
            find_executor(options.executor).open(request) as slots,
            closing(Dispatcher(slots, queue_by_definition(units), options.limit_s).judge()) as news,
        ):
            machine_before = record.machine
            for message in news:
                if isinstance(message, Outcome):
                    yield self._keep(message, add)
                elif isinstance(message, LostSlot):
                    click.echo(f"a judge cannot be started: {message.error}", err=True)
                elif isinstance(message, AskedAgain):
                    click.echo(f"{message.solution} on {message.workload} is judged again: {message.reason}", err=True)
                else:
                    record = record.joined(message)
                    output.check_machine(options.output, machine_before, record.machine)
                    output.write_run(options.output, record)

    def _keep(self, outcome: Outcome, add: AddOutcome) -> Outcome:
        counts = self.weights.get((outcome.definition, outcome.workload))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        count = sum(counts.values()) if counts is not None else None
        outcome = outcome.model_copy(update={"count": count, "timestamp": outcome.timestamp or now})
        add(outcome)
        return outcome


def open_run(options: Options) -> BenchRun:
    """Read everything that there is to judge, and write nothing; CallError where the call cannot work."""
    output.check_bench_output(options.output, [options.path, options.solutions], options.resume, options.force)
    if options.measurements is not None and not options.measurements.is_file():
        raise CallError(f"{options.measurements}: no such file (kcap replay PATH -o {options.measurements} writes one)")
    measurements = [] if options.measurements is None else list(read_measurements(options.measurements))
    options = replace(options, threads=_threads(options, measurements))
    subject = open_subject(options.path, options.trust)
    if (name := options.definition) is not None and name not in subject.definitions:
        near = ", ".join(get_close_matches(name, subject.definitions, cutoff=0.4)) or "none like it"
        raise CallError(f"--definition {name}: {subject.path} has no such Definition ({near})")
    solutions, refused = read_solutions(options.solutions, subject.definitions, options.definition)
    taken = options.choice.takes
    solutions = [found for found in solutions if taken(found.solution.definition)]
    refused = [file for file in refused if file.definition not in subject.definitions or taken(file.definition or "")]
    if not solutions and not refused:
        raise CallError(f"{options.solutions}: no Solution of a Definition that matches --op")
    device = choose_device(options.device, subject.home)
    find_executor(options.executor).check(device, options.threads)
    measured = None
    if options.measurements is not None:
        measured = measured_baseline(measurements, subject.counts, subject.calls)
    weights = workload_weights(subject.counts)
    workloads = choose_workloads(subject, weights, options.workloads)
    return BenchRun(options, subject, solutions, refused, workloads, weights, device, measurements, measured)


def _threads(options: Options, measurements: Sequence[Measurement]) -> int | None:
    """CPU threads of a Solution: as asked for, else those of the run that is resumed, or of the measurements."""
    if options.threads is not None:
        return options.threads
    if options.resume and (options.output / RUN_FILE).is_file():
        return output.read_run(options.output).threads
    return measured_threads(measurements)


def measured_threads(measurements: Iterable[Measurement]) -> int | None:
    """The CPU threads that all `measurements` were made with; None where they are of a GPU, or of several numbers."""
    timed = [line for line in measurements if line.median_us is not None]
    threads = {line.threads for line in timed}
    return threads.pop() if len(threads) == 1 and all(line.device == "cpu" for line in timed) else None


def judge_remaining(bench_run: BenchRun) -> list[Outcome]:
    """Judge what is left; all Outcomes, which are written in the formats of others too."""
    record, kept = bench_run.begin()
    if kept.torn:
        click.echo("the last line of outcomes.jsonl had broken off: it is judged again", err=True)
    units = bench_run.units(kept.outcomes)
    outcomes = list(kept.outcomes)
    with progress() as bar:
        task = bar.add_task("bench", total=sum(len(unit.workloads) for unit in units))
        if units:
            bar.update(task, description="checking references")
        prepared = bench_run.prepare({unit.definition.name for unit in units})
        with closing(bench_run.judge(record, units, prepared)) as judged:
            for outcome in judged:
                outcomes.append(outcome)
                bar.update(task, advance=1, description=f"{outcome.definition} {outcome.solution}"[:40])
    folder, subject = bench_run.options.output, bench_run.subject
    ordered = sorted(outcomes, key=lambda outcome: (*solution_key(outcome), outcome.workload))
    foreign_formats.write_solutions(folder, [found.solution for found in bench_run.solutions], subject.definitions)
    foreign_formats.write_traces(folder, ordered, subject.definitions, subject.workloads)
    foreign_formats.write_benchmark_results(folder, ordered)
    return outcomes


def choose_workloads(subject: Subject, weights: WorkloadWeights, most: int | None) -> dict[str, list[Workload]]:
    """At most `most` Workloads of each Definition, the most counted first."""

    def ordered(name: str) -> list[Workload]:
        def count(workload: Workload) -> int:
            return sum(weights.get((name, workload.uuid), UNCOUNTED_PHASES).values())

        return sorted(subject.workloads.get(name, ()), key=count, reverse=True)

    return {name: ordered(name)[:most] for name in subject.definitions}


def _not_judged(unit: WorkUnit, reason: str) -> Iterator[Outcome]:
    """The Outcomes of a Solution whose Definition is at fault itself."""
    for workload in unit.workloads:
        yield Outcome(
            solution=unit.solution.name,
            author=unit.solution.author,
            definition=unit.definition.name,
            file=unit.file,
            workload=workload.uuid,
            status="NOT_JUDGED",
            reason=reason,
        )


def _still_valid(before: RunRecord, now: RunRecord) -> Callable[[Outcome], bool]:
    """Whether an Outcome of `before` need not be judged again."""
    changed = {
        name
        for name, solution in now.solutions.items()
        if name in before.solutions and before.solutions[name].sha256 != solution.sha256
    }
    again = {"NOT_JUDGED", "TIMEOUT"} if output.allows_more_time(before, now) else {"NOT_JUDGED"}
    return lambda outcome: outcome.status not in again and "/".join(solution_key(outcome)) not in changed

"""One run of `kcap bench`: what is left to judge is judged, and every Outcome is on disk as soon as it is there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime

import click

from kcap.bench.executors import SlotRequest, find_executor
from kcap.bench.executors.common.dispatcher import Dispatcher, LostSlot, WorkUnit, queue_by_definition
from kcap.bench.run import output as outcomes_file
from kcap.bench.run import output as runs
from kcap.bench.run.options import Options
from kcap.bench.run.output import KeptOutcomes, RefusedFile, RunRecord, SolutionFile, solution_key
from kcap.bench.run.subject import PreparedDataset, Subject
from kcap.bench.solutions import FoundSolution, RefusedSolution
from kcap.replay.datasets.workloads import UNCOUNTED_PHASES, WorkloadWeights
from kcap.schemas.flashinfer import solution as solutions_file
from kcap.schemas.flashinfer.definition import Workload
from kcap.schemas.results.outcome import Outcome
from kcap.version import __version__

Add = Callable[[Outcome], object]


@dataclass(frozen=True)
class BenchRun:
    """`chosen`: by Definition, the Workloads to judge on. `device`: cpu, cuda or cuda:N."""

    options: Options
    subject: Subject
    found: Sequence[FoundSolution]
    refused: Sequence[RefusedSolution]
    chosen: Mapping[str, Sequence[Workload]]
    weights: WorkloadWeights
    device: str

    @property
    def run(self) -> RunRecord:
        return RunRecord(
            kcap=__version__,
            path=str(self.options.path),
            identity=self.subject.identity,
            blobs=self.subject.blobs({one.solution.definition for one in self.found}),
            device=self.device,
            threads=self.options.threads,
            options=self.options.told(),
            solutions={_name(one): SolutionFile(file=str(one.file), sha256=_digest(one)) for one in self.found},
            refused=[RefusedFile(file=str(one.file), reason=one.reason) for one in self.refused],
        )

    def begin(self) -> tuple[RunRecord, KeptOutcomes]:
        """bench.json written, and what an earlier run judged that need not be judged again.

        CallError if that was on something else, or elsewhere.
        """
        output, run = self.options.output, self.run
        if not (output / runs.RUN_FILE).is_file():
            runs.write_run(output, run)
            return run, KeptOutcomes([])
        before = runs.read_run(output)
        runs.check_same_run(output, before, run)
        kept = outcomes_file.keep_outcomes(output, _still_valid(before, run))
        run = run.after(before)
        runs.write_run(output, run)
        return run, kept

    def units(self, done: Iterable[Outcome]) -> list[WorkUnit]:
        """What is left: each Solution with the Workloads that it has no Outcome on."""
        judged = {(*solution_key(one), one.workload) for one in done}
        return [unit for one in self.found if (unit := self._unit(one, judged)).workloads]

    def _unit(self, one: FoundSolution, judged: set[tuple[str, str, str, str]]) -> WorkUnit:
        solution = one.solution
        whose = (solution.definition, solution.author, solution.name)
        every = self.chosen[solution.definition]
        left = tuple(workload for workload in every if (*whose, workload.uuid) not in judged)
        return WorkUnit(str(one.file), solution, self.subject.definitions[solution.definition], left)

    def judge(
        self, run: RunRecord, units: Sequence[WorkUnit], prepared: PreparedDataset
    ) -> Generator[Outcome, None, None]:
        """Judge `units`; an Outcome is on disk when it is given. Closing the iterator stops the judges."""
        sound = [unit for unit in units if unit.definition.name not in prepared.faults]
        with outcomes_file.outcome_writer(self.options.output) as add:
            for unit in units:
                if (fault := prepared.faults.get(unit.definition.name)) is not None:
                    yield from self._at_fault(unit, fault, add)
            if sound:
                yield from self._judge(run, sound, prepared, add)

    def _at_fault(self, unit: WorkUnit, reason: str, add: Add) -> Iterator[Outcome]:
        names = {"solution": unit.solution.name, "author": unit.solution.author, "definition": unit.definition.name}
        for workload in unit.workloads:
            told = {"file": unit.file, "workload": workload.uuid, "status": "NOT_JUDGED", "reason": reason}
            yield self._keep(Outcome.model_validate({**names, **told}), add)

    def _judge(
        self, run: RunRecord, units: Sequence[WorkUnit], prepared: PreparedDataset, add: Add
    ) -> Iterator[Outcome]:
        options = self.options
        where = SlotRequest(self.device, options.session(prepared.root), len(units))
        with (
            find_executor(options.executor).open(where) as slots,
            closing(Dispatcher(slots, queue_by_definition(units), options.limit_s).judge()) as told,
        ):
            before = run.machine
            for one in told:
                if isinstance(one, Outcome):
                    yield self._keep(one, add)
                    continue
                if isinstance(one, LostSlot):
                    click.echo(f"a judge cannot be started again: {one.error}", err=True)
                    continue
                run = run.joined(one)
                runs.check_machine(options.output, before, run.machine)
                runs.write_run(options.output, run)

    def _keep(self, outcome: Outcome, add: Add) -> Outcome:
        counts = self.weights.get((outcome.definition, outcome.workload))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        count = sum(counts.values()) if counts is not None else None
        outcome = outcome.model_copy(update={"count": count, "timestamp": outcome.timestamp or now})
        add(outcome)
        return outcome


def choose_workloads(subject: Subject, weights: WorkloadWeights, most: int | None) -> dict[str, list[Workload]]:
    """At most `most` Workloads of each Definition, the most counted first."""

    def count(name: str, workload: Workload) -> int:
        return sum(weights.get((name, workload.uuid), UNCOUNTED_PHASES).values())

    return {
        name: sorted(subject.workloads.get(name, ()), key=lambda one, name=name: -count(name, one))[:most]  # type: ignore[misc]
        for name in subject.definitions
    }


def _name(one: FoundSolution) -> str:
    return f"{one.solution.definition}/{one.solution.author}/{one.solution.name}"


def _digest(one: FoundSolution) -> str:
    return hashlib.sha256(solutions_file.to_bytes(one.solution)).hexdigest()


def _still_valid(before: RunRecord, now: RunRecord) -> Callable[[Outcome], bool]:
    """Whether an Outcome of `before` need not be judged again."""
    changed = {name for name, one in now.solutions.items() if _changed(before.solutions.get(name), one)}
    again = {"NOT_JUDGED", "TIMEOUT"} if runs.allows_more_time(before, now) else {"NOT_JUDGED"}
    return lambda one: one.status not in again and "/".join(solution_key(one)) not in changed


def _changed(before: SolutionFile | None, now: SolutionFile) -> bool:
    return before is not None and before.sha256 != now.sha256

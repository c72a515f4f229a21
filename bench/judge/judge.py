"""Judges Solutions on Workloads, one after another: Outcomes, whatever the Solutions do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kcap.bench.judge.candidate import FEW, Candidate, NoGraph
from kcap.bench.judge.driver.start import start_candidate
from kcap.bench.judge.input_pool import draw_inputs
from kcap.bench.judge.process import POISON, ForkServer, Limits, NotBuilt, ProcessEnded, Stirred, TooSlow
from kcap.bench.judge.reference import (
    AtFault,
    ReferenceOracle,
    ReferencePrecision,
    open_oracle,
    unanswered,
    with_widest_spread,
)
from kcap.bench.judge.timing import WAY_SHARE
from kcap.bench.judge.trial import Trial
from kcap.bench.judge.verdict import Floors, Rejected
from kcap.errors import KcapError
from kcap.replay.datasets.spreads import Spread, spreads_for
from kcap.schemas.derive.bound_call import Skip
from kcap.schemas.derive.constraints import BrokenConstraint
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import Definition, Workload
from kcap.schemas.flashinfer.solution import Solution
from kcap.schemas.results.outcome import Clocked, Outcome, Status

REFERENCE_FACTOR = 3  # times the seconds that a Solution gets: it is asked more
MOST_TOLD = 200  # characters of why something cannot be captured
NO_GATE = "it could not wait, takes long, or needs its process"
MOST_DEATHS = 3  # of one Solution's processes, before the rest of its Workloads are not tried


@dataclass
class RunningSolution:
    """The Solution in hand: its process, or why there is none for any Workload (`failure`)."""

    solution: Solution
    candidate: Candidate | None = None
    ended: Candidate | None = None
    uncaptured: str | None = None
    failure: tuple[Status, str, str] | None = None
    deaths: int = 0


@dataclass
class WorkloadFindings:
    """What is known of a Workload since it was first judged. `settled`: the inputs on which its reference can be judged
    by, and its precision there; `small_integers`: it refused larger ones; `reference_count`: invocations of a batch of
    the reference's.
    """

    settled: tuple[Spread, ReferencePrecision] | None = None
    small_integers: bool = False
    reference_count: int = FEW


@dataclass
class Judge:
    """`root`: the dataset that blobs are read from. `environment`: what Outcomes say of the machine."""

    root: Path | None
    limits: Limits
    seconds: float
    server: ForkServer
    floors: Floors
    environment: dict[str, Any]
    running: RunningSolution | None = None
    references: dict[tuple[str, str], Candidate] = field(default_factory=dict)  # by the form's name and code
    uncaptured: dict[str, str] = field(default_factory=dict)  # why references cannot be captured, by Definition
    findings: dict[tuple[str, str], WorkloadFindings] = field(default_factory=dict)  # by Definition and Workload

    def judge(self, solution: Solution, definition: Definition, workload: Workload) -> Outcome:
        """What comes of it; no error of the Solution's, the Definition's or the Workload's leaves here, nor one of the
        machine's. ForkServerGone, where the fork server has died."""
        began = time.monotonic()
        names = self._names(solution, definition, workload)
        try:
            verdict = self._judge(solution, definition, workload)
        except (AtFault, Skip, BrokenConstraint) as error:
            verdict = {"status": "NOT_JUDGED", "reason": str(error)}
        except KcapError as error:
            verdict = {"status": "NOT_JUDGED", "reason": str(error)}
            with suppress(OSError, KcapError):
                self._drop()  # it may be why
        except (OSError, torch.OutOfMemoryError) as error:
            verdict = {"status": "NOT_JUDGED", "reason": f"this machine lacks what judging takes: {error}"}
            with suppress(OSError, KcapError):
                self.close()  # either process may be halfway
        return Outcome(**{**names, **verdict, "seconds": round(time.monotonic() - began, 3)})

    def close(self) -> None:
        """End its processes; the next judgement starts its own."""
        try:
            self._drop()
        finally:
            self._drop_references()

    def _judge(self, solution: Solution, definition: Definition, workload: Workload) -> dict[str, Any]:
        """What cannot be captured is started again, to be launched as it is."""
        while True:
            try:
                return self._attempt(solution, definition, workload)
            except NoGraph as refused:
                self._without_graphs(definition, refused)

    def _without_graphs(self, definition: Definition, refused: NoGraph) -> None:
        candidate = refused.candidate
        if self.running and self.running.candidate is candidate:
            self.running.ended, self.running.candidate, self.running.uncaptured = candidate, None, str(refused)
            candidate.end(keep=True)
        else:
            self._drop_references()
            self.uncaptured[definition.name] = str(refused)

    def _attempt(self, solution: Solution, definition: Definition, workload: Workload) -> dict[str, Any]:
        if self.running and self.running.solution != solution:
            self._drop()  # before anything is asked of what it may hold
        findings = self.findings.setdefault((definition.name, workload.uuid), WorkloadFindings())
        try:
            truth = self._truth(definition, workload, findings)
            verdict = self._trial(solution, truth, findings)
        except AtFault:
            self._drop_references()
            if findings.settled is None or not findings.settled[0].integers:
                raise
            findings.settled = None  # few of the larger integers are none that the reference takes
            findings.small_integers = True
            return self._attempt(solution, definition, workload)
        notes = [*truth.drawn.example.notes, *truth.precision.notes, *verdict.get("notes", ())]
        caveats = timing_caveats(verdict.get("time"))
        return {**verdict, "notes": [*notes, *caveats, *self._launched(definition, truth)]}

    def _launched(self, definition: Definition, truth: ReferenceOracle) -> Iterator[str]:
        """What is launched while the clock runs, and why."""
        gpu, ours = self.limits.gpu_memory, self.running.uncaptured if self.running else None
        candidate = self.running.candidate if self.running else None
        if gpu and not gpu.gates:
            yield f"graphs are launched while the clock runs: on {gpu.device} one could not wait for it"
        for whose, one in (("its", candidate), ("its reference's", truth.timed)) if gpu and gpu.gates else ():
            if one and one.workload and not one.workload.gated:
                yield f"{whose} graph is launched while the clock runs: {NO_GATE}"
        for what, why in (("it", ours), ("its reference", self.uncaptured.get(definition.name))):
            if why is not None:
                first, _, _ = why.partition("\n")
                yield f"{what} is launched, as it cannot be captured in a CUDA graph: {first[:MOST_TOLD]}"

    def _truth(self, definition: Definition, workload: Workload, findings: WorkloadFindings) -> ReferenceOracle:
        """On the widest spread of inputs by which the reference can be judged, or the one that was before."""
        dataset = Dataset(self.root) if self.root else None

        def on_spread(spread: Spread, known: ReferencePrecision | None = None) -> ReferenceOracle:
            drawn = draw_inputs(definition, workload, dataset, self.limits.memory, spread)
            truth = open_oracle(partial(self._reference, definition), drawn, known)
            findings.settled = drawn.draws.spread, truth.precision
            return truth

        if findings.settled:
            return on_spread(*findings.settled)
        spreads = [each for each in spreads_for(definition) if not (each.integers and findings.small_integers)]
        return with_widest_spread(spreads, on_spread)

    def _reference(self, definition: Definition, form: Definition) -> Candidate:
        """The process of a form of `definition`; those of another Definition end."""
        if any(name != definition.name for name, _ in self.references):
            self._drop_references()
        key = definition.name, form.reference
        found = self.references.get(key)
        if found is None or found.how is not None:
            if found is not None:
                del self.references[key]
                found.end()
            try:
                found = self.references[key] = self._start_reference(form)
            except (NotBuilt, TooSlow) as error:
                raise AtFault(f"its reference: {error}") from None
            except ProcessEnded as error:
                raise AtFault(f"its reference's process ended {error}") from None
        return found

    def _start_reference(self, definition: Definition) -> Candidate:
        timeout, option = REFERENCE_FACTOR * self.limits.timeout, f"{REFERENCE_FACTOR} times {self.limits.option}"
        limits = replace(self.limits, timeout=timeout, option=option)
        return start_candidate(self.server, limits, definition, graphs=definition.name not in self.uncaptured)

    def _drop_references(self) -> None:
        while self.references:
            self.references.popitem()[1].end()

    def _trial(self, solution: Solution, truth: ReferenceOracle, findings: WorkloadFindings) -> dict[str, Any]:
        running = self._running(solution)
        if running.failure:
            status, reason, log = running.failure
            return {"status": status, "reason": reason, "log": log}
        assert running.candidate is not None
        trial = Trial(running.candidate, truth, self.seconds, reference_count=findings.reference_count)
        verdict = self._verdict(trial, running)
        findings.reference_count = trial.reference_count
        more = {"accuracy": trial.accuracy, "wrong": trial.wrong, "confined": trial.candidate.confined}
        return {**verdict, **more, "notes": trial.notes}

    def _verdict(self, trial: Trial, running: RunningSolution) -> dict[str, Any]:
        candidate = trial.candidate
        try:
            times = trial.run()
            floor = self.floors.check(trial.truth.drawn, times.solution)
            timed = {"time": times.solution, "reference": times.reference, "floor_us": floor}
            return {"status": "PASSED", **timed, "log": candidate.printed()}
        except Rejected as rejected:
            if POISON in str(rejected):
                candidate.end(keep=True)
                return self._died(running, rejected.status, str(rejected))
            raised = rejected.status == "RUNTIME_ERROR"  # and printed a traceback
            return {"status": rejected.status, "reason": str(rejected), "log": candidate.printed(raised)}
        except (TooSlow, ProcessEnded) as error:
            if any(each.how is not None for each in (trial.truth.reference, trial.truth.timed)):  # it was asked
                raise unanswered(error) from None
            return self._died(running, *status_of(error))

    def _died(self, running: RunningSolution, status: Status, reason: str) -> dict[str, Any]:
        """The next Workload gets a process of its own, unless too many have ended."""
        assert running.candidate is not None
        log = running.candidate.last_words
        running.ended, running.candidate, running.deaths = running.candidate, None, running.deaths + 1
        if running.deaths >= MOST_DEATHS:
            words = f"{reason} (not tried again: {running.deaths} of its processes ended so)"
            running.failure = status, words, log
        return {"status": status, "reason": reason, "log": log}

    def _running(self, solution: Solution) -> RunningSolution:
        if self.running is None:
            self.running = RunningSolution(solution)
        if self.running.candidate is None and self.running.failure is None:
            self._start(self.running)
        return self.running

    def _start(self, running: RunningSolution) -> None:
        try:
            running.candidate = start_candidate(
                self.server, self.limits, running.solution, running.ended, running.uncaptured is None
            )
            running.ended = None
        except NotBuilt as error:
            running.failure = "COMPILE_ERROR", str(error), error.log
        except TooSlow as error:
            running.failure = "TIMEOUT", str(error), ""
        except ProcessEnded as error:
            running.failure = "RUNTIME_ERROR", f"its process ended {error}", ""

    def _drop(self) -> None:
        running, self.running = self.running, None
        last = running and (running.candidate or running.ended)
        if last:
            last.end()

    def _names(self, solution: Solution, definition: Definition, workload: Workload) -> dict[str, Any]:
        return {
            **self.environment,
            "solution": solution.name,
            "author": solution.author,
            "definition": definition.name,
            "workload": workload.uuid,
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def status_of(error: ProcessEnded | TooSlow) -> tuple[Status, str]:
    """What is said of a Solution whose process had to be ended, or ended."""
    match error:
        case TooSlow():
            return "TIMEOUT", str(error)
        case Stirred():
            return "REWARD_HACK", str(error)
    return "RUNTIME_ERROR", f"its process ended: {error}"


def timing_caveats(time: Clocked | None) -> list[str]:
    """What to know of a time in which the way to the process and back is more than a small share."""
    if time is None or time.way_us is None or time.way_us <= 1.5 * WAY_SHARE * time.median_us:
        return []
    share = time.way_us / time.median_us
    return [f"the way to its process and back is {share:.0%} of its time: no more invocations fit into a batch"]

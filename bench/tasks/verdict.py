"""From the Outcomes of one Solution to a Verdict: what passed, how fast, what it gains, and what to do next."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kcap.bench.run.summary.baseline import Baseline, References, why_not_comparable
from kcap.bench.run.summary.report import describe_wrong
from kcap.bench.run.summary.score import GRAVEST, Saving, Score, savings, score_solutions
from kcap.bench.solutions import FoundSolution, RefusedSolution
from kcap.bench.tasks.compiler_messages import compiler_messages
from kcap.bench.tasks.draft import bound_of, workload_cost
from kcap.bench.tasks.folder import OpenTask
from kcap.bench.tasks.report import sizes_of
from kcap.replay.datasets.workloads import UNCOUNTED_PHASES, workload_weights
from kcap.replay.roofline.ceilings import Ceilings, read_ceilings
from kcap.replay.roofline.floor import floor_parts
from kcap.schemas.derive.cost import Cost
from kcap.schemas.flashinfer.definition import SafetensorsInput, Workload
from kcap.schemas.results.outcome import Clocked, Outcome, Status
from kcap.schemas.results.verdict import (
    CompilerMessage,
    Gain,
    HeldOutVerdict,
    LimitedBy,
    Spread,
    Verdict,
    WorkloadVerdict,
)
from kcap.version import __version__

AT_LAUNCH = 2  # times the time of a kernel that does next to nothing
MOST_LOG = 4000  # characters of the end of what was printed
NEAR_FLOOR = 1.3  # times the floor: little is left
FindCeilings = Callable[[Mapping[str, object]], Ceilings | None]


@dataclass(frozen=True)
class Judgement:
    """What was asked and what came of it. `held_out`: Outcomes on Workloads that the folder does not have."""

    opened: OpenTask
    solution_file: FoundSolution
    outcomes: Sequence[Outcome]
    held_out: Sequence[Outcome] = ()
    quick: bool = False
    first_seconds: float | None = None
    seconds: float = 0.0
    find_ceilings: FindCeilings = field(default=read_ceilings)

    def verdict(self) -> Verdict:
        first = self.outcomes[0]
        worst = self._worst
        held_out = self._held_out()
        workloads = [self.workload(outcome) for outcome in self.outcomes]
        status: Status = worst.status if worst is not None else "PASSED"
        log = worst.log if worst is not None else first.log
        verdict = Verdict(
            kcap=__version__,
            definition=self.opened.name,
            solution=self.solution_file.solution.name,
            author=self.solution_file.solution.author,
            file=str(self.solution_file.file),
            status=status,
            reason=self._reason(worst),
            complete=self._complete(held_out),
            quick=self.quick,
            compiler=self._compiler(worst),
            log="" if worst is not None and worst in self.held_out else log[-MOST_LOG:],
            workloads=workloads,
            baseline=self.baseline.title,
            gain={phase: _gain(saving) for phase, saving in self._savings.items()},
            held_out=held_out,
            notes=self._notes(),
            device=first.device,
            device_name=first.device_name,
            threads=first.threads,
            torch=first.torch,
            driver=first.driver,
            first_seconds=self.first_seconds,
            seconds=self.seconds,
        )
        return verdict.model_copy(update={"next": list(next_steps(verdict))})

    @property
    def _worst(self) -> Outcome | None:
        """The gravest Outcome against it, of those in the folder before those kept back."""
        against = [outcome for outcome in (*self.outcomes, *self.held_out) if outcome.status != "PASSED"]
        return min(against, key=lambda outcome: GRAVEST.index(outcome.status), default=None)

    def _reason(self, worst: Outcome | None) -> str | None:
        if worst is None or worst not in self.held_out:
            return worst.reason if worst else None
        failed = sum(outcome.status != "PASSED" for outcome in self.held_out)
        return f"on {failed} of the {len(self.held_out)} held-out Workloads it does not pass: sizes that the task lacks"

    def _complete(self, held_out: HeldOutVerdict | None) -> bool:
        judged = sum(outcome.status != "NOT_JUDGED" for outcome in self.outcomes)
        kept = held_out is None or held_out.judged == held_out.workloads
        return judged == len(self.opened.workloads) and kept

    def _compiler(self, worst: Outcome | None) -> list[CompilerMessage]:
        if worst is None or worst in self.held_out or worst.status not in ("COMPILE_ERROR", "RUNTIME_ERROR"):
            return []
        sources = [source.path for source in self.solution_file.solution.sources]
        return compiler_messages(worst.log, sources)

    @cached_property
    def baseline(self) -> Baseline:
        """The engine's times, where they are of this machine."""
        if self._incomparable is not None:
            return References()
        return self.opened.baseline

    @cached_property
    def _incomparable(self) -> str | None:
        return why_not_comparable(self.opened.measurements, self.outcomes)

    def _notes(self) -> list[str]:
        notes = [f"the engine's times are {self._incomparable}: not compared"] if self._incomparable else []
        notes += [self.opened.held_out_note] if self.opened.held_out_note and not self.quick else []
        return [*notes, *self.baseline.notes]

    @cached_property
    def _score(self) -> Score:
        uuids = [workload.uuid for workload in self.opened.workloads]
        return score_solutions(self.outcomes, {self.opened.name: uuids}, self.opened.weights)[0]

    @cached_property
    def _savings(self) -> dict[str, Saving]:
        return savings(self._score, self.opened.weights, self.baseline)

    def workload(self, outcome: Outcome) -> WorkloadVerdict:
        """What is said of one Workload."""
        workload = self._by_uuid[outcome.workload]
        engine = self._engine_us(outcome)
        before = engine if engine is not None else outcome.reference.median_us if outcome.reference else None
        us = outcome.time.median_us if outcome.time else None
        cost = self._cost(workload)
        passed = outcome.status == "PASSED"
        return WorkloadVerdict(
            workload=outcome.workload,
            axes=workload.axes,
            status=outcome.status,
            reason=outcome.reason,
            count=self.opened.count(outcome.workload) if self.opened.dataset.counts else None,
            share=self.opened.count(outcome.workload) / (self._invocations or 1),
            time=_spread(outcome.time),
            reference=_spread(outcome.reference),
            engine_us=engine,
            floor_us=outcome.floor_us,
            times_floor=us / outcome.floor_us if us and outcome.floor_us else None,
            speedup=before / us if passed and before and us else None,
            limited_by=self._limited_by(outcome, cost),
            gb_s=cost.bytes / us / 1e3 if cost and us else None,
            tflop_s=cost.flops / us / 1e6 if cost and us and cost.flops else None,
            accuracy=outcome.accuracy,
            wrong=outcome.wrong,
            notes=outcome.notes,
            seconds=outcome.seconds,
        )

    @cached_property
    def _by_uuid(self) -> dict[str, Workload]:
        return {workload.uuid: workload for workload in self.opened.workloads}

    @cached_property
    def _invocations(self) -> int:
        return sum(self.opened.count(uuid) for uuid in self._by_uuid)

    def _engine_us(self, outcome: Outcome) -> float | None:
        if isinstance(self.baseline, References):
            return None
        counts = self.opened.weights.get((self.opened.name, outcome.workload), UNCOUNTED_PHASES)
        times = self.baseline.before(outcome, counts)
        invocations = sum(counts[phase] for phase in times)
        return sum(times.values()) / invocations if invocations else None

    def _cost(self, workload: Workload) -> Cost | None:
        dataset = self.opened.dataset
        stored = {
            name: dataset.blob(value) for name, value in workload.inputs.items() if isinstance(value, SafetensorsInput)
        }
        return workload_cost(self.opened.definition, workload, stored)

    def _limited_by(self, outcome: Outcome, cost: Cost | None) -> LimitedBy | None:
        """What bounds any kernel at this size; `launch`: the Solution takes hardly more than a kernel without work."""
        if cost is None or outcome.time is None:
            return None
        ceilings = self.find_ceilings(
            outcome.model_dump(include={"device_name", "driver", "torch", "threads", "device"})
        )
        if ceilings is None:
            return None
        if ceilings.empty_us and outcome.time.median_us <= AT_LAUNCH * ceilings.empty_us:
            return "launch"
        return bound_of(*floor_parts(cost, ceilings, outcome.time.cache or "warm"))

    def _held_out(self) -> HeldOutVerdict | None:
        kept = self.opened.task.held_out
        dataset = self.opened.held_out
        if dataset is None:
            if kept is None:
                return None
            return HeldOutVerdict(workloads=kept.workloads, note=self.opened.held_out_note)
        uuids = [workload.uuid for workload in dataset.workloads.get(self.opened.name, [])]
        if not self.held_out:
            return HeldOutVerdict(workloads=len(uuids), note="judged last, once the others are" if self.quick else None)
        score = score_solutions(self.held_out, {self.opened.name: uuids}, workload_weights(dataset.counts))[0]
        return HeldOutVerdict(
            workloads=len(uuids),
            judged=score.judged,
            passed=len(score.passed),
            statuses=dict(Counter(outcome.status for outcome in self.held_out)),
            speedup=score.weighted,
        )


REFUSED_LINE = re.compile(r"\(line (\d+)\)")


def refused_verdict(opened: OpenTask, refused: RefusedSolution) -> Verdict:
    """Of a file that is no Solution: what a compiler would say, without a judge."""
    line = REFUSED_LINE.search(refused.reason)
    messages = [CompilerMessage(file=refused.file.name, line=int(line[1]), text=refused.reason)] if line else []
    verdict = Verdict(
        kcap=__version__,
        definition=opened.name,
        solution=refused.name,
        file=str(refused.file),
        status="COMPILE_ERROR",
        reason=refused.reason,
        compiler=messages,
        device=opened.task.device or "",
    )
    return verdict.model_copy(update={"next": list(next_steps(verdict))})


def _gain(saving: Saving) -> Gain:
    return Gain(
        before_us=saving.before_us,
        after_us=saving.after_us,
        saved_us=saving.saved_us,
        speedup=saving.before_us / saving.after_us if saving.after_us else None,
        total_us=saving.total_us,
        share=saving.share,
    )


def _spread(time: Clocked | None) -> Spread | None:
    if time is None:
        return None
    return Spread(
        median_us=time.median_us,
        q1_us=time.q1_us,
        q3_us=time.q3_us,
        samples=len(time.samples_us),
        method=time.method,
        cache=time.cache,
    )


NEXT_BY_STATUS: dict[Status, str] = {
    "COMPILE_ERROR": "mend what the compiler says",
    "RUNTIME_ERROR": "mend what it raised",
    "INCORRECT_SHAPE": "return outputs of the Definition's shapes",
    "INCORRECT_DTYPE": "return outputs of the Definition's dtypes",
    "INCORRECT_NUMERICAL": "compare with reference.py at the elements that are wrong",
    "TIMEOUT": "it hangs, or is far too slow: try it on the smallest Workload by itself",
    "REWARD_HACK": "compute every output from this call's inputs before run returns",
    "NOT_JUDGED": "the fault is not the Solution's: judge again on an idle machine, or see the reason",
}


def next_steps(verdict: Verdict) -> Iterator[str]:
    """What to do next, as far as it was measured."""
    if verdict.status != "PASSED":
        yield NEXT_BY_STATUS[verdict.status]
        for message in verdict.compiler[:1]:
            yield f"{message.file}:{message.line}: {message.text}"
        wrong = [(workload, output) for workload in verdict.workloads for output in workload.wrong]
        for workload, output in wrong[:1]:
            yield f"at {sizes_of(workload)}: {describe_wrong(output)}"
        return
    if verdict.quick:
        yield "right on the most counted Workload: judge all of them, without --quick"
    timed = [workload for workload in verdict.workloads if workload.time is not None]
    slower = [workload for workload in timed if workload.speedup is not None and workload.speedup < 1]
    if slower:
        worst = max(slower, key=_lost_us)
        yield f"slower than {verdict.baseline} at {sizes_of(worst)}: {1 / (worst.speedup or 1):.2f} times its time"
    heaviest = max(
        timed,
        key=lambda workload: (workload.time.median_us if workload.time else 0) * (workload.count or 1),
        default=None,
    )
    if heaviest is not None and heaviest.time is not None:
        yield from _room_at(heaviest)


def _lost_us(workload: WorkloadVerdict) -> float:
    return (workload.time.median_us if workload.time else 0.0) * (1 - (workload.speedup or 1)) * (workload.count or 1)


def _room_at(workload: WorkloadVerdict) -> Iterator[str]:
    """Where most of its time goes, and how far that is from the floor."""
    where = f"most of its time goes to {sizes_of(workload)}"
    match workload.limited_by:
        case "launch":
            yield f"{where}, where it takes hardly more than a launch: only fewer kernels would help"
        case "memory" | "compute" if workload.times_floor is not None and math.isfinite(workload.times_floor):
            rate = f"{workload.gb_s:,.0f} GB/s" if workload.limited_by == "memory" and workload.gb_s else ""
            rate = f"{workload.tflop_s:.3g} TFLOP/s" if workload.limited_by == "compute" and workload.tflop_s else rate
            reached = f" ({rate} now)" if rate else ""
            if workload.times_floor <= NEAR_FLOOR:
                yield f"{where}, which is {workload.times_floor:.2f} times the floor: little is left{reached}"
            else:
                bound = "memory" if workload.limited_by == "memory" else "arithmetic"
                yield f"{where}, {workload.times_floor:.1f} times the floor, which {bound} sets{reached}"
        case _:
            yield where

"""One judge of one task, kept running: the first judgement pays for its start, the others do not.

The judge itself is that of `kcap bench`; here it is only asked.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from kcap.bench.run.executors import SlotRequest, find_executor
from kcap.bench.run.executors.common.dispatcher import WorkUnit, ask_judge
from kcap.bench.run.executors.common.slot import Slot
from kcap.bench.run.executors.local import choose_device
from kcap.bench.run.options import JudgeOptions, Options
from kcap.bench.solutions import FoundSolution, RefusedSolution
from kcap.bench.tasks.folder import OpenTask
from kcap.bench.tasks.verdict import Judgement, refused_verdict
from kcap.errors import CallError
from kcap.schemas.flashinfer.definition import Definition, Workload
from kcap.schemas.results.outcome import Outcome
from kcap.schemas.results.verdict import Verdict, WorkloadVerdict

OnWorkload = Callable[[WorkloadVerdict], object]


def ignore(_: WorkloadVerdict) -> None:
    """Nobody is told of single Workloads."""


class WarmJudge:
    """A context in which Solutions of one task are judged, one after another. One thread uses it."""

    def __init__(self, opened: OpenTask, options: JudgeOptions) -> None:
        self.opened = opened
        self.options = options
        self.environment: dict[str, Any] = {}
        self._stack = ExitStack()
        self._slot: Slot | None = None
        self._limit_s = 0.0

    def __enter__(self) -> WarmJudge:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._slot is not None:
            self._slot.close()
        self._stack.close()

    def _open(self) -> None:
        """Start the judge on a copy of what it reads, which a Solution cannot see."""
        root = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kcap-judge-")))
        self.opened.copy_datasets(root)
        device = choose_device(self.options.device, self.opened.task.device)
        threads = self._measured_threads(device) if self.options.threads is None else self.options.threads
        judged = {**asdict(self.options), "threads": threads}
        bench_options = Options(path=self.opened.root, solutions=self.opened.root, output=root, **judged)
        self._limit_s = bench_options.limit_s
        session = bench_options.session(root)
        if self.opened.held_out is not None:
            session["hidden"] = [*session.get("hidden", []), str(self.opened.held_out.root.resolve())]
        local = find_executor("local")
        local.check(device, bench_options.threads)
        slots = self._stack.enter_context(local.open(SlotRequest(device, session, most=1)))
        self._slot = slots[0]
        self.environment = self._slot.start()
        if error := self.environment.get("error"):
            raise CallError(str(error))

    def _measured_threads(self, device: str) -> int | None:
        """As many as the engine's kernel had, so that the times compare."""
        threads = {line.threads for line in self.opened.measurements if line.median_us is not None}
        return threads.pop() if device == "cpu" and len(threads) == 1 else None

    def judge(self, solution_file: FoundSolution, workloads: Sequence[Workload]) -> Iterator[Outcome]:
        """The Outcome on each of `workloads`, as soon as it is there."""
        yield from self._ask(solution_file, self.opened.definition, workloads)

    def judge_held_out(self, solution_file: FoundSolution) -> Iterator[Outcome]:
        """The Outcomes on the Workloads that were kept back."""
        held_out = self.opened.held_out
        if held_out is not None:
            definition = held_out.definitions[self.opened.name]
            yield from self._ask(solution_file, definition, held_out.workloads.get(self.opened.name, []))

    def verdict(
        self, solution_file: FoundSolution | RefusedSolution, quick: bool = False, on_workload: OnWorkload = ignore
    ) -> Verdict:
        """Judge `solution_file` on the most counted Workload alone (`quick`), or on all.

        Those that were kept back come last, and only where it passed on the others. `tell` is called with what is said
        of each Workload as soon as it is there.
        """
        if isinstance(solution_file, RefusedSolution):
            return refused_verdict(self.opened, solution_file)
        began = time.monotonic()
        outcomes: list[Outcome] = []
        first_seconds = None
        for outcome in self.judge(solution_file, self.opened.workloads[:1] if quick else self.opened.workloads):
            outcomes.append(outcome)
            first_seconds = first_seconds or round(time.monotonic() - began, 3)
            on_workload(Judgement(self.opened, solution_file, outcomes).workload(outcome))
            if outcome.status == "COMPILE_ERROR":
                break
        right = all(outcome.status == "PASSED" for outcome in outcomes)
        held_out = list(self.judge_held_out(solution_file)) if right and not quick else []
        seconds = round(time.monotonic() - began, 3)
        return Judgement(self.opened, solution_file, outcomes, held_out, quick, first_seconds, seconds).verdict()

    def _ask(
        self, solution_file: FoundSolution, definition: Definition, workloads: Sequence[Workload]
    ) -> Iterator[Outcome]:
        assert self._slot is not None, "used outside its context"
        unit = WorkUnit(str(solution_file.file), solution_file.solution, definition, tuple(workloads))
        for workload, request in unit.requests():
            yield ask_judge(self._slot, unit, workload, request, self._limit_s)

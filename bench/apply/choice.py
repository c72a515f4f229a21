"""Which of the Solutions that were judged are put in, and where: those that are faster than the engine's own kernels.

A Solution is chosen for a Call if it PASSED on every Workload of the Call on which it was judged, at least on one for
each of their axes, and is faster there than the engine's kernel was measured to be. Of several the fastest is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from kcap.bench.apply.views import POOLS, NoView, views_of
from kcap.bench.contents import open_contents
from kcap.bench.problems import problems_of
from kcap.bench.run.output import OUTCOMES_FILE, read_run, solution_key
from kcap.errors import CallError
from kcap.schemas.derive.kernel import CallUse, DerivedDefinition
from kcap.schemas.flashinfer import solution as solutions_file
from kcap.schemas.flashinfer.solution import Solution
from kcap.schemas.recording.phases import PHASES
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Call
from kcap.schemas.recording.seam import seam_of
from kcap.schemas.results.bench_run import RUN_FILE, RunRecord
from kcap.schemas.results.outcome import Outcome, read_outcomes
from kcap.schemas.results.plan import METADATA_FILE, LeftOut, Plan, PlanMachine, Replacement, file_sha256
from kcap.show.gain import CallTime
from kcap.version import __version__


@dataclass(frozen=True)
class Judged:
    """What `kcap bench` left in a folder. `outcomes`: by Solution (`definition/author/name`), then by Workload."""

    path: Path
    run: RunRecord
    solutions: Mapping[str, Solution]
    outcomes: Mapping[str, Mapping[str, Outcome]]

    def machine(self) -> PlanMachine:
        run = self.run.machine
        return PlanMachine(
            device=self.run.device.partition(":")[0], device_name=", ".join(run.devices), torch=run.torch
        )


def read_judged(path: Path) -> Judged:
    """What lies in `path`; CallError where it is no output of `kcap bench`, or a Solution was changed since."""
    if not (path / RUN_FILE).is_file():
        raise CallError(f"{path}: is no output of kcap bench (it has no {RUN_FILE})")
    run = read_run(path)
    solutions: dict[str, Solution] = {}
    for file in sorted((path / "solutions").rglob("*.json")):
        solution = solutions_file.read(file)
        judged = run.solutions.get(solution.key)
        if judged is not None and judged.sha256 != solution.sha256:
            raise CallError(f"{file}: was changed since it was judged: judge it again (kcap bench --resume)")
        solutions[solution.key] = solution
    outcomes: dict[str, dict[str, Outcome]] = defaultdict(dict)
    for outcome in read_outcomes(path / OUTCOMES_FILE):
        outcomes["/".join(solution_key(outcome))][outcome.workload] = outcome
    return Judged(path, run, solutions, outcomes)


@dataclass(frozen=True)
class Wishes:
    """`names`: of the Solutions that may be put in; empty: all. `slower`: those that are slower than the engine's
    kernel, too, which tells whether what is measured is what was predicted."""

    names: Collection[str] = ()
    slower: bool = False


def make_plan(recording: Recording, judged: Judged, times: Mapping[int, CallTime], wishes: Wishes) -> Plan:
    """The plan for `recording`, whose Calls (by id) take `times`; CallError where a name in `wishes` was not judged."""
    if unknown := set(wishes.names) - {solution.name for solution in judged.solutions.values()}:
        raise CallError(f"--solution {unknown.pop()}: is not among those that were judged in {judged.path}")
    choice = _Choice(recording, judged, times, wishes)
    replacements, left_out = choice.all()
    used = {replacement.solution for replacement in replacements}
    metadata = recording.metadata
    return Plan(
        kcap=__version__,
        recording=str(recording.path.resolve()),
        recording_sha256=file_sha256(recording.path / METADATA_FILE),
        model=metadata.model,
        framework=metadata.framework,
        framework_version=metadata.framework_version,
        machine=judged.machine(),
        steps=metadata.steps,
        total_us={phase: us for phase in PHASES if (us := _total_us(recording.kernels(), times, phase))},
        solutions={sha256: s for s in judged.solutions.values() if (sha256 := s.sha256) in used},
        replacements=replacements,
        left_out=left_out,
    )


def _total_us(calls: Sequence[Call], times: Mapping[int, CallTime], phase: str) -> float:
    return sum(call.counted(phase) * times[call.id].us.get(phase, 0.0) for call in calls if call.id in times)


class _Choice:
    def __init__(self, recording: Recording, judged: Judged, times: Mapping[int, CallTime], wishes: Wishes) -> None:
        self._judged, self._times, self._wishes = judged, times, wishes
        problems = problems_of(open_contents(recording.path, allow_truncated=True), engine_forms=True)
        assert problems.derived is not None  # of a Recording
        self._why_no_form = problems.derived.why_no_form
        self._engine_forms = {
            use.call.id: kernel.definition.name for kernel in problems.derived.engine_forms for use in kernel.uses
        }
        self._kernels = {kernel.definition.name: kernel for kernel in problems.derived.definitions}
        self._workloads: dict[tuple[str, int], set[str]] = defaultdict(set)
        for count in (count for problem in problems.problems for count in problem.counts):
            self._workloads[count.definition, count.call].add(count.workload)
        self._axes = {
            uuid: tuple(sorted((axis, size) for axis, size in workload.axes.items() if axis not in POOLS))
            for problem in problems.problems
            for uuid, workload in problem.workloads.items()
        }

    def all(self) -> tuple[list[Replacement], list[LeftOut]]:
        chosen: dict[int, tuple[Solution, Replacement]] = {}
        left_out: list[LeftOut] = []
        for name, solution in self._judged.solutions.items():
            if self._wishes.names and solution.name not in self._wishes.names:
                continue
            kernel = self._kernels.get(solution.definition)
            if kernel is None:
                left_out.append(LeftOut.of(solution, None, "the Recording has no such Definition"))
                continue
            for use in kernel.uses:
                found = self._replacement(solution, self._judged.outcomes.get(name, {}), kernel, use)
                before = chosen.get(use.call.id)
                if isinstance(found, str):
                    left_out.append(LeftOut.of(solution, use.call, found))
                elif before is None or found.solution_us < before[1].solution_us:
                    left_out += [LeftOut.of(before[0], use.call, "another is faster")] if before else []
                    chosen[use.call.id] = solution, found
                else:
                    left_out.append(LeftOut.of(solution, use.call, "another is faster"))
        return [chosen[call][1] for call in sorted(chosen)], left_out

    def _replacement(
        self, solution: Solution, outcomes: Mapping[str, Outcome], kernel: DerivedDefinition, use: CallUse
    ) -> Replacement | str:
        """What is put in for the Call, or why nothing is."""
        seam = seam_of(use.call)
        if seam is None:
            return "the engine has no seam for it"
        of_call = sorted(self._workloads[kernel.definition.name, use.call.id])
        workloads = [workload for workload in of_call if workload in outcomes]
        judged = {self._axes[workload] for workload in workloads}
        missing = [workload for workload in of_call if self._axes[workload] not in judged]
        if reason := next(_why_not_passed([*workloads, *missing], outcomes), None):
            return reason
        solution_us = fmean(outcomes[workload].time.median_us for workload in workloads)  # type: ignore[union-attr]
        engine_us = {phase: us for phase, us in self._engine_us(use.call).items() if use.call.counted(phase)}
        if not engine_us:
            return "the engine's own kernel was not timed: there is nothing to be faster than"
        fastest = min(engine_us.values())
        if solution_us >= fastest and not self._wishes.slower:
            return f"takes {solution_us:.2f} us, and the engine's kernel {fastest:.2f} us"
        try:
            views = views_of(kernel.definition, use)
        except NoView as error:
            return self._why_no_view(kernel.definition.name, use.call, error)
        return Replacement(
            call=use.call,
            seam=seam,
            definition=kernel.definition.name,
            solution=solution.sha256,
            workloads=workloads,
            inputs=views.inputs,
            outputs=views.outputs,
            returned=views.returned,
            several=views.several,
            hints=views.hints,
            padding=views.padding,
            engine_us=engine_us,
            solution_us=solution_us,
        )

    def _why_no_view(self, definition: str, call: Call, error: NoView) -> str:
        if (form := self._engine_forms.get(call.id)) not in (None, definition):
            return f"{error}: {form} takes what the engine passes"
        return self._why_no_form.get(call.id) or str(error)

    def _engine_us(self, call: Call) -> Mapping[str, float]:
        return self._times[call.id].us if call.id in self._times else {}


def _why_not_passed(workloads: Sequence[str], outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    if not workloads:
        yield "no Workload could be made of it"
    for workload in workloads:
        outcome = outcomes.get(workload)
        if outcome is None:
            yield f"was not judged on its Workload {workload[:8]}"
        elif outcome.status != "PASSED" or outcome.time is None:
            yield f"{outcome.status} on its Workload {workload[:8]}: {outcome.reason or 'without a time'}"


def guilty_part(
    replacements: Sequence[Replacement], fails: Callable[[Sequence[Replacement]], bool]
) -> Sequence[Replacement]:
    """Those of `replacements`, which fail together, that fail alone, found by halves; more than one only if no half of
    them fails."""
    while len(replacements) > 1:
        middle = len(replacements) // 2
        half = next((part for part in (replacements[:middle], replacements[middle:]) if fails(part)), None)
        if half is None:
            break
        replacements = half
    return replacements

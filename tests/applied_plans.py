"""A plan as `kcap apply` makes it, of Solutions that need not be judged first."""

from __future__ import annotations

from pathlib import Path

from kcap.bench.apply.choice import Judged, Wishes, make_plan
from kcap.bench.contents import open_contents
from kcap.bench.problems import problems_of
from kcap.schemas.flashinfer.solution import BuildSpec, Solution, SourceFile
from kcap.schemas.recording.recording import Recording
from kcap.schemas.results.bench_run import Machine, RunRecord
from kcap.schemas.results.outcome import Clocked, Outcome
from kcap.schemas.results.plan import Plan
from kcap.show.gain import CallTime


def python_solution(definition: str, source: str, name: str = "mine") -> Solution:
    spec = BuildSpec(
        language="python", target_hardware=["any"], entry_point="main.py::run", destination_passing_style=False
    )
    return Solution(
        name=name, definition=definition, author="test", spec=spec, sources=[SourceFile(path="main.py", content=source)]
    )


def plan_of(recording: Recording, *solutions: Solution, us: float = 5.0, engine_us: float = 10.0) -> Plan:
    """All Solutions PASSED with `us` on every Workload; each of the engine's kernels takes `engine_us`."""
    times = {call.id: CallTime({count.phase: engine_us for count in call.counts}, None) for call in recording.kernels()}
    return make_plan(recording, passed(recording, *solutions, us=us), times, Wishes(slower=us > engine_us))


def passed(recording: Recording, *solutions: Solution, us: float = 5.0) -> Judged:
    """All Solutions PASSED with `us` on every Workload."""
    workloads = {
        problem.definition.name: list(problem.workloads)
        for problem in problems_of(open_contents(recording.path, allow_truncated=True), engine_forms=True).problems
    }
    outcomes = {
        f"{solution.definition}/{solution.author}/{solution.name}": {
            workload: Outcome(
                solution=solution.name, author=solution.author, definition=solution.definition, workload=workload,
                status="PASSED", time=Clocked(median_us=us, q1_us=us, q3_us=us),
            )
            for workload in workloads[solution.definition]
        }
        for solution in solutions
    }  # fmt: skip
    run = RunRecord(kcap="0", path=str(recording.path), identity="", device="cpu", machine=Machine())
    return Judged(Path("judged"), run, dict(zip(outcomes, solutions, strict=True)), outcomes)

"""Profiled steps, and what was replayed of them, written by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kcap.replay.fidelity.compare import ReplayedCall, compare
from kcap.replay.fidelity.engine import KindSteps, step_kind
from kcap.replay.fidelity.verdict import PROGRAM, SERVING, KindFidelity, ProgramTime
from kcap.schemas.recording.recording import Call
from kcap.schemas.results.coverage import KernelTime, StepCoverage

NAMES = {0: "gemm", 1: "flash", 2: "norm"}
CALLS = {number: Call(id=number, operator=f"lib::{name}") for number, name in NAMES.items()}


def kernel(call: int | None, us: float, start: float | None = None, **more: object) -> KernelTime:
    name = "lost" if call is None else NAMES[call]
    reason = "no recorded call" if call is None else None
    return KernelTime.model_validate(
        {"name": name, "us": us, "call": call, "reason": reason, "start_us": start, **more}
    )


def step(*kernels: KernelTime, **more: object) -> StepCoverage:
    known = {"index": 0, "phase": "decode", "tokens": 4, "sequences": 4, "program": 0}
    return StepCoverage.model_validate({**known, "kernels": list(kernels), **more})


def in_a_row(*times: tuple[int | None, float]) -> list[KernelTime]:
    """Kernels that follow each other without a gap, all launched long before."""
    found: list[KernelTime] = []
    start = 0.0
    for call, us in times:
        found.append(kernel(call, us, start, launched_us=-1000.0))
        start += us
    return found


def steps_of(*steps: StepCoverage, **invocations: int) -> KindSteps:
    """`gemm=2`: how often a Call ran in all of the steps."""
    numbers = {name: number for number, name in NAMES.items()}
    ran = Counter({numbers[name]: count for name, count in invocations.items()})
    return KindSteps(step_kind(steps[0]), steps, ran)


def times(found: Mapping[int, float]) -> dict[int, ReplayedCall]:
    """One invocation of each Call, by the kernels that the engine launched."""
    return {number: ReplayedCall(us, "", frozenset([NAMES[number]])) for number, us in found.items()}


def judged(
    engine: KindSteps,
    serving: Mapping[int, ReplayedCall],
    in_program: Mapping[int, ReplayedCall] | None = None,
    program: ProgramTime | None = None,
) -> KindFidelity:
    """Without `in_program`: as in serving. Without `program`: as long as the span."""
    states = (
        compare(engine, CALLS, serving, SERVING),
        compare(engine, CALLS, serving if in_program is None else in_program, PROGRAM),
    )
    span = engine.span
    return KindFidelity.of(engine, *states, program or ProgramTime(span.own_us if span else 1.0))

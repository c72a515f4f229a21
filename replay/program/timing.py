"""Time a Program: on a GPU captured in one CUDA graph, on the CPU with the host's clock, one invocation after another.

Where a Call between cannot be captured there are as few graphs as can be; where one of these waits for the GPU, or
launches behind it outnumber what the GPU queues, the host's time is in the result, which says so. On the CPU the
dispatch from Python is included.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from statistics import median
from typing import Any

import torch

from kcap.replay.program.durations import CallDurations, share_out
from kcap.replay.program.flow import Flow
from kcap.replay.program.parts import Part, Parts, RestoredStorages
from kcap.replay.timing import graphs, rotation
from kcap.replay.timing.blocking import SleepHold, blocker
from kcap.replay.timing.clock import preemptions, repeat_run
from kcap.replay.timing.device import ClockWatch, Pace
from kcap.replay.timing.graphs import CaptureFailed, Run, capture_graph, timed_us, timing_stream
from kcap.replay.timing.sampling import FEWEST_SAMPLES, HOLD_GAVE_UP, WAITS_FOR_GPU, Budget, Sampled, sample_until
from kcap.schemas.results.measurement import DISTURBED, Method


@dataclass(frozen=True)
class ProgramTiming:
    """`sampled`: microseconds of one run, in each of which the clock saw `n`; `stretches`: the CUDA graphs it took."""

    sampled: Sampled
    n: int
    method: Method
    shared: CallDurations
    stretches: int = 0
    notes: list[str] = field(default_factory=list)
    spoiled: bool = False


PROFILED_RUNS = 3  # runs in the pass for kernel durations


LEAST_SAMPLE_US = 1000.0  # that one sample lasts


AloneByCall = Mapping[
    int, Mapping[str, Any]
]  # by Call, what it told when it ran alone: kcap.replay.program.job.AloneResult


def time_on_gpu(
    order: Sequence[int], made: Parts, restore: Run, known: AloneByCall, budget: Budget, device: str
) -> ProgramTiming:
    """Microseconds of a run of `order` (Calls) from the first kernel's start to the last one's end, and durations."""
    flow, parts = Flow(made.activations), made.good
    stream = timing_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    rotation.reset_persisting_lines()
    with torch.cuda.stream(stream):
        for part in parts.values():
            repeat_run(part.run, len(part.sets))()
        waits = any(known[call]["waits"] for call in parts)
        run, stretches, direct, failure = capture_stretches(order, parts, flow, known, restore)
        hold = None if waits else reset_hold(blocker(device))
        alone = timed_us(run, 1, restore, stream, hold)
        n = max(1, round(LEAST_SAMPLE_US / max(alone, 1.0))) if not direct else 1
        work = repeat_run(run, n)
        rested = RunInTurn([Pace(device).rest, restore])
        take = partial(timed_us, work, n, rested, stream, hold)
        sampled = sample_until(take, budget, slow=ClockWatch(device).slow, fewest=FEWEST_SAMPLES)
        shared, notes = profile_calls(run, rested, order, known)
    torch.cuda.synchronize(device)
    notes = [*graph_notes(direct, len(order), failure, waits, hold), *notes]
    return ProgramTiming(sampled, n, "events" if direct else "graph", shared, stretches, notes, bool(failure))


def reset_hold(hold: SleepHold) -> SleepHold:
    """`hold`, used again where it gave up for another Call."""
    hold.reset()
    return hold


def capture_stretches(
    order: Sequence[int], parts: dict[int, Part], flow: Flow, known: AloneByCall, restore: Run
) -> tuple[Run, int, int, str | None]:
    """What runs the Program; its graphs; how many invocations are in none of them; why no graph could be made."""
    runs: list[Run] = []
    graphs, direct = 0, 0
    restore()
    try:
        for captured, some in groupby(order, key=lambda call: known[call]["method"] == "graph"):
            stretch = RunInTurn([partial(flow.run, parts[call]) if captured else parts[call].run for call in some])
            runs.append(capture_graph(stretch, 1) if captured else stretch)
            graphs += captured
            direct += 0 if captured else len(stretch.steps)
    except CaptureFailed as failure:
        torch.cuda.synchronize()
        return RunInTurn([parts[call].run for call in order]), 0, len(order), str(failure)
    return RunInTurn(runs), graphs, direct, None


class RunInTurn:
    """Does `steps` one after another."""

    def __init__(self, steps: Sequence[Callable[[], Any]]) -> None:
        self.steps = steps

    def __call__(self) -> None:
        for step in self.steps:
            step()


def graph_notes(direct: int, whole: int, failure: str | None, waits: bool, hold: SleepHold | None) -> list[str]:
    """Why the Program is not one graph, if it is not, and whether the host's time is in what was measured."""
    why = f"no CUDA graph: {failure}" if failure else f"{direct} of {whole} invocations are in no CUDA graph"
    host = WAITS_FOR_GPU if waits else HOLD_GAVE_UP if hold and hold.gave_up else None
    return [*([why] if direct else []), *([host] if host else [])]


def profile_calls(run: Run, restore: Run, order: Sequence[int], known: AloneByCall) -> tuple[CallDurations, list[str]]:
    """The durations of every kernel of a run, given to the Calls."""
    runs = []
    try:
        for _ in range(PROFILED_RUNS):
            restore()
            runs.append(graphs.kernel_runs(run))
    except (RuntimeError, AttributeError, AssertionError) as error:
        return CallDurations(), [f"no kernel durations: {str(error)[:120] or type(error).__name__}"]
    names = {call: dict(known[call]["kernels"]) for call in set(order)}
    shared = share_out(runs, order, names)
    if shared.total_us is None:
        return shared, ["no kernel durations: the profiler saw no kernel (is another one running?)"]
    lost = (shared.unmatched_us or 0) / shared.total_us if shared.total_us else 0
    return shared, [f"{lost:.1%} of the kernels' time could be given to no call"] if lost else []


HOST_PASSES = 3  # runs in which each invocation is timed by itself


def time_on_host(
    order: Sequence[int], parts: dict[int, Part], restore: RestoredStorages, budget: Budget
) -> ProgramTiming:
    """Microseconds of a run of `order` (Calls), and of each Call in a pass of its own."""
    invocations = [(call, parts[call]) for call in order]
    for _, part in invocations:
        part.run()

    def sample() -> float:
        restore()
        start = time.perf_counter_ns()
        for _, part in invocations:
            part.run()
        return (time.perf_counter_ns() - start) / 1e3

    before = preemptions()
    sampled = sample_until(sample, budget)
    notes = [DISTURBED] if preemptions() - before > len(sampled.samples) / 4 else []
    times: dict[int, list[float]] = defaultdict(list)
    for _ in range(HOST_PASSES):
        restore()
        for call, part in invocations:
            start = time.perf_counter_ns()
            part.run()
            times[call].append((time.perf_counter_ns() - start) / 1e3)
    return ProgramTiming(
        sampled, 1, "host", CallDurations({call: median(us) for call, us in times.items()}), notes=notes
    )

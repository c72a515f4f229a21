"""Time a Program: on a GPU in one CUDA graph; on the CPU by the host's clock, one invocation after another.

Calls that cannot be captured split the Program into several graphs. Where one of them waits for the GPU, or the
launches exceed the GPU's queue, the result includes the host's time, and a note says so. On the CPU the dispatch from
Python is included.
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

from kcap.replay.program.durations import CallDurations, attribute_kernels
from kcap.replay.program.flow import Flow
from kcap.replay.program.job import ProgramPart
from kcap.replay.program.prepared import PreparedCall, PreparedCalls, ProgramSnapshot
from kcap.replay.timing import graphs, rotation
from kcap.replay.timing.blocking import SleepBlocker, gpu_blocker
from kcap.replay.timing.clock import preemptions, repeat_run
from kcap.replay.timing.device import ClockWatch, CoolDown
from kcap.replay.timing.graphs import CaptureFailed, Run, capture_graph, timed_us, timing_stream
from kcap.replay.timing.sampling import BLOCKER_TIMED_OUT, FEWEST_SAMPLES, WAITS_FOR_GPU, Budget, Sampled, sample_until
from kcap.schemas.results.measurement import DISTURBED, Method


@dataclass(frozen=True)
class ProgramTiming:
    """`sampled`: microseconds of one run, by samples of `n` runs. `stretches`: the number of CUDA graphs."""

    sampled: Sampled
    n: int
    method: Method
    durations: CallDurations
    stretches: int = 0
    notes: list[str] = field(default_factory=list)
    poisoned: bool = False


PROFILED_RUNS = 3  # in the pass for kernel durations
HOST_PASSES = 3  # runs in which each invocation is timed by itself
MIN_SAMPLE_US = 1000.0
Standalone = Mapping[int, ProgramPart]  # by Call, how it ran by itself


def time_on_gpu(
    order: Sequence[int], prepared: PreparedCalls, restore: Run, standalone: Standalone, budget: Budget, device: str
) -> ProgramTiming:
    """Microseconds of a run of `order` (Calls), from the first kernel's start to the last one's end, and durations."""
    flow, parts = Flow(prepared.activations), prepared.good
    stream = timing_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    rotation.reset_l2_persistence()
    with torch.cuda.stream(stream):
        for part in parts.values():
            repeat_run(part.run, len(part.sets))()
        waits = any(standalone[call]["waits"] for call in parts)
        run, stretches, direct, failure = capture_stretches(order, parts, flow, standalone, restore)
        blocker = None if waits else gpu_blocker(device)
        if blocker:
            blocker.reset()
        single = timed_us(run, 1, restore, stream, blocker)
        n = max(1, round(MIN_SAMPLE_US / max(single, 1.0))) if not direct else 1
        work = repeat_run(run, n)
        before = RunInTurn([CoolDown(device).wait, restore])
        take_sample = partial(timed_us, work, n, before, stream, blocker)
        sampled = sample_until(take_sample, budget, is_slow=ClockWatch(device).slow, min_samples=FEWEST_SAMPLES)
        durations, notes = profile_calls(run, before, order, standalone)
    torch.cuda.synchronize(device)
    notes = [*graph_notes(direct, len(order), failure, waits, blocker), *notes]
    return ProgramTiming(sampled, n, "events" if direct else "graph", durations, stretches, notes, bool(failure))


def capture_stretches(
    order: Sequence[int], parts: dict[int, PreparedCall], flow: Flow, standalone: Standalone, restore: Run
) -> tuple[Run, int, int, str | None]:
    """A function that runs the Program, its number of graphs, invocations outside graphs, and why no graph works."""
    runs: list[Run] = []
    graphs, uncaptured = 0, 0
    restore()
    try:
        for captured, calls in groupby(order, key=lambda call: standalone[call]["method"] == "graph"):
            stretch = RunInTurn([partial(flow.run, parts[call]) if captured else parts[call].run for call in calls])
            runs.append(capture_graph(stretch, 1) if captured else stretch)
            graphs += captured
            uncaptured += 0 if captured else len(stretch.steps)
    except CaptureFailed as failure:
        torch.cuda.synchronize()
        return RunInTurn([parts[call].run for call in order]), 0, len(order), str(failure)
    return RunInTurn(runs), graphs, uncaptured, None


class RunInTurn:
    """Runs `steps` one after another."""

    def __init__(self, steps: Sequence[Callable[[], Any]]) -> None:
        self.steps = steps

    def __call__(self) -> None:
        for step in self.steps:
            step()


def graph_notes(
    uncaptured: int, total: int, failure: str | None, waits: bool, blocker: SleepBlocker | None
) -> list[str]:
    """Why the Program is not one graph, if it is not, and whether the measured time includes the host's."""
    graph_note = f"no CUDA graph: {failure}" if failure else f"{uncaptured} of {total} invocations are in no CUDA graph"
    host_note = WAITS_FOR_GPU if waits else BLOCKER_TIMED_OUT if blocker and blocker.timed_out else None
    return [*([graph_note] if uncaptured else []), *([host_note] if host_note else [])]


def profile_calls(
    run: Run, restore: Run, order: Sequence[int], standalone: Standalone
) -> tuple[CallDurations, list[str]]:
    """The durations of the kernels of a run, attributed to the Calls."""
    runs = []
    try:
        for _ in range(PROFILED_RUNS):
            restore()
            runs.append(graphs.kernel_runs(run))
    except (RuntimeError, AttributeError, AssertionError) as error:
        return CallDurations(), [f"no kernel durations: {str(error)[:120] or type(error).__name__}"]
    names = {call: dict(standalone[call]["kernels"]) for call in set(order)}
    durations = attribute_kernels(runs, order, names)
    if durations.total_us is None:
        return durations, ["no kernel durations: the profiler saw no kernel (is another one running?)"]
    unmatched = (durations.unmatched_us or 0) / durations.total_us if durations.total_us else 0
    return durations, [f"{unmatched:.1%} of the kernels' time could be given to no call"] if unmatched else []


def time_on_host(
    order: Sequence[int], parts: dict[int, PreparedCall], restore: ProgramSnapshot, budget: Budget
) -> ProgramTiming:
    """Microseconds of a run of `order` (Calls) and, in separate passes, of each Call."""
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

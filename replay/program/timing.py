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
from math import isnan, nan
from statistics import median
from typing import Any

import torch

from kcap.replay.group.clock import GpuGroupSampler, GroupSampler
from kcap.replay.group.peers import Alone
from kcap.replay.group.transfers import transfer_of, usual_transfer
from kcap.replay.program.durations import CallDurations, attribute_kernels
from kcap.replay.program.flow import Flow
from kcap.replay.program.job import ProgramPart
from kcap.replay.program.prepared import PreparedCall, PreparedCalls, ProgramSnapshot
from kcap.replay.timing import graphs, rotation
from kcap.replay.timing.blocking import SleepBlocker, gpu_blocker
from kcap.replay.timing.clock import preemptions, repeat_run
from kcap.replay.timing.device import CoolDown
from kcap.replay.timing.graphs import CaptureFailed, Run, capture_graph, timing_stream
from kcap.replay.timing.sampling import BLOCKER_TIMED_OUT, FEWEST_SAMPLES, WAITS_FOR_GPU, Budget, Sampled
from kcap.schemas.results.measurement import DISTURBED, Method


@dataclass(frozen=True)
class ProgramTiming:
    """`sampled`: microseconds of one run, by samples of `n` runs. `stretches`: the number of CUDA graphs.

    `waited_us`: of one run, what a rank waited for others in collectives, the mean over ranks; not in `durations`. What
    it waited for the others to start is not told.
    """

    sampled: Sampled
    n: int
    method: Method
    durations: CallDurations
    stretches: int = 0
    notes: list[str] = field(default_factory=list)
    poisoned: bool = False
    waited_us: float = 0.0


PROFILED_RUNS = 3  # in the pass for kernel durations
HOST_PASSES = 3  # runs in which each invocation is timed by itself
MIN_SAMPLE_US = 1000.0
Standalone = Mapping[int, ProgramPart]  # by Call, how it ran by itself


def time_on_gpu(
    order: Sequence[int], prepared: PreparedCalls, restore: Run, standalone: Standalone, budget: Budget, peers: Alone
) -> ProgramTiming:
    """Microseconds of a run of `order` (Calls), from the first kernel's start to the last one's end, and durations."""
    flow, parts, device = Flow(prepared.activations), prepared.good, peers.device
    stream = timing_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    rotation.reset_l2_persistence()
    with torch.cuda.stream(stream):
        for part in parts.values():
            repeat_run(part.run, len(part.sets))()
        waits = any(standalone[call]["waits"] for call in parts)
        run, stretches, direct, failure = capture_stretches(order, parts, flow, standalone, restore, peers)
        blocker = None if waits else gpu_blocker(device)
        if blocker:
            blocker.reset()
        single = GpuGroupSampler(peers, restore, blocker=blocker).sample(run, 1)
        n = max(1, round(MIN_SAMPLE_US / max(single, 1.0))) if not direct else 1
        before = RunInTurn([CoolDown(device).wait, restore])
        sampler = GpuGroupSampler(peers, before, blocker=blocker)
        sampled = sampler.sample_until(repeat_run(run, n), n, budget, FEWEST_SAMPLES)
        durations, notes = profile_calls(run, before, order, standalone)
        waited_us = take_waits_out(durations, order, parts, peers)
    torch.cuda.synchronize(device)
    notes = [*graph_notes(direct, len(order), failure, waits, blocker), *notes]
    method: Method = "events" if direct else "graph"
    return ProgramTiming(sampled, n, method, durations, stretches, notes, bool(failure), waited_us)


def take_waits_out(
    durations: CallDurations, order: Sequence[int], parts: Mapping[int, PreparedCall], peers: Alone
) -> float:
    """Leave the transfer of each collective in `durations`; what a rank waited in a run, the mean over ranks, in µs.

    What it waited in the run's first collective is not in it: so much later did another rank start the run, under the
    profiler, and the Program's own clock runs from the arrival of the last rank on.
    """
    collectives = [position for position, call in enumerate(order) if parts[call].call.group]
    if not collectives:
        return 0.0
    runs = durations.runs or [[nan] * len(order)] * PROFILED_RUNS
    table = peers.gather([run[position] for run in runs for position in collectives])
    table = table.view(peers.size, len(runs), len(collectives))
    shortest, mean = table.amin(0), table.mean(0)  # by run and collective; nan where a rank has none
    waits = torch.zeros_like(shortest)
    for call in {order[position] for position in collectives}:
        own = torch.tensor([order[position] == call for position in collectives])
        of_call = shortest[:, own].flatten().tolist()
        if not any(map(isnan, of_call)):
            usual = usual_transfer(of_call)
            transfers = torch.tensor([transfer_of(us, usual) for us in of_call], dtype=torch.float64)
            durations.us[call] = float(transfers.mean())
            waits[:, own] = mean[:, own] - transfers.view(len(runs), -1)
    return float(waits[:, 1:].sum(1).median())


def capture_stretches(
    order: Sequence[int],
    parts: dict[int, PreparedCall],
    flow: Flow,
    standalone: Standalone,
    restore: Run,
    peers: Alone,
) -> tuple[Run, int, int, str | None]:
    """A function that runs the Program, its number of graphs, invocations outside graphs, and why no graph works."""
    runs: list[Run] = []
    graphs, uncaptured = 0, 0
    restore()
    try:
        for captured, calls in groupby(order, key=lambda call: standalone[call]["method"] == "graph"):
            stretch = RunInTurn([partial(flow.run, parts[call]) if captured else parts[call].run for call in calls])
            runs.append(capture_graph(stretch, 1, peers.end_capture) if captured else stretch)
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
    order: Sequence[int], parts: dict[int, PreparedCall], restore: ProgramSnapshot, budget: Budget, peers: Alone
) -> ProgramTiming:
    """Microseconds of a run of `order` (Calls) and, in separate passes, of each Call."""
    invocations = [parts[call] for call in order]
    run = RunInTurn([part.run for part in invocations])
    run()
    sampler, before = GroupSampler(peers, restore), preemptions()
    sampled = sampler.sample_until(run, 1, budget)
    disturbed = peers.any(preemptions() - before > len(sampled.samples) / 4)
    times, waits = defaultdict[int, list[float]](list), list[float]()
    for _ in range(HOST_PASSES):
        restore()
        took, waited_us = time_invocations(invocations, peers)
        waits.append(waited_us)
        for call, us in zip(order, took, strict=True):
            times[call].append(us)
    durations = CallDurations({call: median(us) for call, us in times.items()})
    notes = [DISTURBED] if disturbed else []
    return ProgramTiming(sampled, 1, "host", durations, notes=notes, waited_us=median(waits))


def time_invocations(invocations: Sequence[PreparedCall], peers: Alone) -> tuple[list[float], float]:
    """Microseconds of each invocation, and what a rank waited in collectives, the mean over ranks.

    A collective's are from the arrival of the last rank on, as in kcap.replay.group.clock.
    """
    starts, ends = list[float](), list[float]()
    peers.barrier()
    for part in invocations:
        starts.append(time.monotonic_ns() / 1e3)
        part.run()
        ends.append(time.monotonic_ns() / 1e3)
    table = peers.gather([*starts, *ends])
    started, ended = table[:, : len(starts)], table[:, len(starts) :]
    took, waited_us = [end - start for start, end in zip(starts, ends, strict=True)], 0.0
    for index, part in enumerate(invocations):
        if part.call.group:
            last = started[:, index].max()
            took[index] = float(ended[:, index].max() - last)
            waited_us += float((last - started[:, index]).mean())
    return took, waited_us

"""Time a callable on its inputs by the clock that is theirs: the GPU's where a tensor lies there, else the host's.

On the CPU: back to back, the dispatch from Python included. On a GPU: back-to-back time of a captured CUDA graph, or
event pairs where none can be captured. Back-to-back time has the gap between two graph nodes in it (about 1 µs); a
profiler's kernel duration has not, and is of a pass of its own.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from statistics import median
from typing import Any

import torch

from kcap.replay.rebuild import memory
from kcap.replay.timing.blocking import blocker
from kcap.replay.timing.device import ClockWatch, Pace
from kcap.replay.timing.graphs import (
    CaptureFailed,
    GpuWork,
    Run,
    capture_graph,
    do_nothing,
    profile_kernels,
    timed_us,
    timing_stream,
    why_it_waits,
    work_notes,
)
from kcap.replay.timing.rotation import (
    COLD_FACTOR,
    Rotation,
    RoundRobin,
    SavedStorages,
    invocations_in_a_replay,
    l2_bytes,
    nodes,
    reset_persisting_lines,
    sweeper,
)
from kcap.replay.timing.sampling import Budget, Sampled, Timing, sample_until
from kcap.schemas.derive import bound_call
from kcap.schemas.derive.bound_call import Inputs
from kcap.schemas.results.measurement import AT_FLOOR, DISTURBED, NOTHING, KernelDuration, Method

__all__ = ["COLD_FACTOR", "clock_floor_us", "l2_bytes", "time_cuda"]


def time_on(
    device: str,
    call: Callable[..., Any],
    first: Inputs,
    rotation: Rotation,
    restored: list[bound_call.StorageKey],
    seconds: float,
    profiled: bool = False,
) -> Timing:
    """Time `call` on `first`, and on a GPU on the clones that its `rotation` asks for. `restored`: what it writes to.

    `seconds`: of sampling. `profiled`: on a GPU the durations of its kernels, too.
    """
    if uses_gpu(first):
        return time_cuda(call, first, rotation, restored, Budget.on(device, seconds), device, profiled)
    saved = SavedStorages.of(first, restored)
    longest = LONGEST_IN_PLACE if restored else LONGEST_LOOP
    return time_host(call, first, lambda: saved.restore([first]), Budget.on("cpu", seconds), longest)


def uses_gpu(inputs: Inputs) -> bool:
    """Whether a tensor lies on a GPU or one is made there; the rest is the host's work."""
    given = [*inputs.args, *inputs.kwargs.values()]
    made = any(isinstance(value, torch.device) and value.type == "cuda" for value in given)
    return made or any(place.startswith("cuda") for place, _ in inputs.buffers)


SAMPLE_NS = 200_000  # the least that one sample lasts, far above the clock's resolution


LONGEST_LOOP = 100_000


LONGEST_IN_PLACE = 64  # halved this often, numbers are not yet denormal, which would be slow


def time_host(
    call: Callable[..., Any], inputs: Inputs, restore: Callable[[], None], budget: Budget, longest: int = LONGEST_LOOP
) -> Timing:
    """Median time of `call` on one set of inputs, which stays in the caches (`warm`).

    `restore` runs before each sample, so at most `longest` invocations see what those before them wrote.
    """
    first = loop_ns(call, inputs, 1)
    if first > budget.most * 1e9:
        return Timing([first / 1e3], 1, "limit", "host", "cold", 1, ["one invocation alone"])
    restore()
    again = loop_ns(call, inputs, 1)
    n = min(max(SAMPLE_NS // max(again, 1), 1), longest)

    def take() -> float:
        restore()
        return loop_ns(call, inputs, n) / n / 1e3

    before = preemptions()
    found = sample_until(take, budget)
    notes = [DISTURBED] if preemptions() - before > len(found.samples) / 4 else []
    return Timing(found.samples, n, found.rule, "host", "warm", 1, notes)


def preemptions() -> int:
    """How often other processes took the CPU away from this one."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def loop_ns(call: Callable[..., Any], inputs: Inputs, n: int) -> int:
    """Nanoseconds of `n` invocations."""
    args, kwargs = inputs.args, inputs.kwargs
    start = time.perf_counter_ns()
    for _ in range(n):
        call(*args, **kwargs)
    return time.perf_counter_ns() - start


FLOOR_SAMPLES = 11


MOST_QUEUED = 64  # invocations behind one event pair: the GPU's queue takes 1,024 launches, then the host waits


ESTIMATE_ROUNDS = 3  # over all sets, to choose the graph's length: one may be disturbed


SHORT_RUN_US = 200.0  # below it one event pair is no estimate


def time_cuda(
    call: Callable[..., Any],
    first: Inputs,
    rotation: Rotation,
    restored: list[bound_call.StorageKey],
    budget: Budget,
    device: str,
    profiled: bool = False,
) -> Timing:
    """Times of `call` on `first` and clones of it, on a stream of its own; `restored`: the storages it writes to.

    `profiled`: its kernels' durations, too.
    """
    stream = timing_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    reset_persisting_lines()
    with torch.cuda.stream(stream):
        floors = clock_floor_us(device)
        work, sets = warmed_work(call, first, rotation, restored, device)
        found = sample_until(work.sample, budget, slow=ClockWatch(device).slow)
        state = rotation.reached(sets, work.n, device)
        notes = work_notes(work)
        no_kernel = work.method == "graph" and median(found.samples) < floors["graph"] / 2  # none is that fast
        if no_kernel:
            return Timing([0.0], work.n, found.rule, "none", "warm", sets, [NOTHING], floor_us=floors["graph"])
        ran, lost = profile_kernels(work) if profiled else ([], [])
    torch.cuda.synchronize(device)
    floor = floors[work.method]
    notes += [AT_FLOOR] if median(found.samples) < 2 * floor else []
    return gpu_timing(found, work, notes + lost, state, sets, floor, ran)


def warmed_work(
    call: Callable[..., Any], first: Inputs, rotation: Rotation, restored: list[bound_call.StorageKey], device: str
) -> tuple[GpuWork, int]:
    """What is timed, and over how many sets of inputs it goes."""
    saved, alone = SavedStorages.of(first, restored), RoundRobin(call, [first])
    estimate, waits = warm_up(alone, timing_stream(device), device)
    returned = alone.result_bytes()
    alone.let_go()
    saved.restore([first])
    more = (
        0 if waits and not rotation.cold else rotation.sets(estimate, returned, memory.free_bytes(device), device) - 1
    )
    sets = [first, *(rotation.clone() for _ in range(more))]
    places = rotation.result_places(returned, len(sets), memory.free_bytes(device), device)
    made = captured_work(partial(RoundRobin, call, sets, places), sets, rotation, waits, estimate, saved, device)
    return replace(made, rest=Pace(device).rest), len(sets)


def gpu_timing(
    found: Sampled, work: GpuWork, notes: list[str], state: Any, sets: int, floor: float, ran: list[KernelDuration]
) -> Timing:
    return Timing(
        found.samples, work.n, found.rule, work.method, state, sets, notes, work.spoiled, floor, found.slow, ran
    )


@cache
def clock_floor_us(device: str) -> dict[Method, float]:
    """What adding one to one number takes, by each method: nothing that does work is faster."""
    stream = timing_stream(device)
    cell = torch.zeros(1, device=device)

    def run() -> None:
        cell.add_(1)

    estimate, _ = warm_up(run, stream, device)
    n = nodes(estimate, 1)
    graph = GpuWork(capture_graph(run, n), n, do_nothing, stream, blocker(device))
    alone = GpuWork(repeat_run(run, MOST_QUEUED), MOST_QUEUED, do_nothing, stream, blocker(device))
    return {
        "graph": median(graph.sample() for _ in range(FLOOR_SAMPLES)),
        "events": median(alone.sample() for _ in range(FLOOR_SAMPLES)),
    }


def captured_work(
    new_turns: Callable[[], Run],
    sets: list[Inputs],
    rotation: Rotation,
    waits: str | None,
    estimate: float,
    saved: SavedStorages,
    device: str,
) -> GpuWork:
    """A captured graph of turns over `sets`, or where they cannot be captured what takes them again and again, behind a
    held GPU; a call that waits for the GPU itself can neither be held back nor repeated without its waits.

    `new_turns` begins them anew, so that no result of an earlier graph lives on.
    """
    stream = timing_stream(device)
    sweep = sweeper(device) if rotation.cold and rotation.size.touched else do_nothing

    def before() -> None:
        saved.restore(sets)
        sweep()

    def graph(n: int) -> GpuWork:
        memory.return_unused_memory(device)
        return GpuWork(capture_graph(new_turns(), n), n, before, stream, blocker(device))

    if waits:
        return GpuWork(new_turns(), 1, before, stream, None, waits)
    before()
    try:
        return graph(rotation.invocations(us_in_rotation(graph, len(sets), estimate), len(sets), device))
    except CaptureFailed as failure:
        torch.cuda.synchronize()
        n = min(invocations_in_a_replay(estimate), MOST_QUEUED)
        return GpuWork(repeat_run(new_turns(), n), n, before, stream, blocker(device), str(failure), spoiled=True)


def us_in_rotation(graph: Callable[[int], GpuWork], sets: int, estimate: float) -> float:
    """Microseconds of one invocation in a `graph` that goes once round so many sets; `estimate` as it is where there is
    one set, or a graph uses each only once.

    The length of the graph that is timed is chosen by it: a time with one set in the caches differs more from one
    process to the next.
    """
    if not 1 < sets < nodes(estimate, 1):
        return estimate
    once = graph(sets)
    return min(once.sample() for _ in range(ESTIMATE_ROUNDS))


def repeat_run(run: Run, n: int) -> Run:
    def all_of_them() -> None:
        for _ in range(n):
            run()

    return all_of_them


def warm_up(run: Run, stream: torch.cuda.Stream, device: str) -> tuple[float, str | None]:
    """Run until every lazy step is done: microseconds of one run, and why it waits for the GPU (None: it does not)."""
    hold = blocker(device)
    hold.reset()
    run()
    torch.cuda.synchronize(device)
    waits = why_it_waits(run)
    held = None if waits else hold
    alone = timed_us(run, 1, do_nothing, stream, held)
    if waits or alone > SHORT_RUN_US:
        return alone, waits
    return timed_us(repeat_run(run, 8), 8, do_nothing, stream, held), None

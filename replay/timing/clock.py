"""Time a callable on its inputs: by the GPU's clock if a tensor is on a GPU, else by the host's.

On the CPU: back to back, with the dispatch from Python. On a GPU: the back-to-back time of a captured CUDA graph, or
event pairs where none can be captured. Back-to-back time includes the gap between two graph nodes (about 1 µs); the
durations of kernels do not, and are measured in a separate pass.
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
from kcap.replay.timing.blocking import gpu_blocker
from kcap.replay.timing.device import ClockWatch, CoolDown
from kcap.replay.timing.graphs import (
    CaptureFailed,
    GpuWork,
    Run,
    capture_graph,
    detect_sync,
    do_nothing,
    profile_kernels,
    timed_us,
    timing_stream,
    work_notes,
)
from kcap.replay.timing.rotation import (
    InputSnapshot,
    Rotation,
    RoundRobin,
    graph_length,
    invocations_in_a_replay,
    l2_bytes,
    reset_l2_persistence,
    sweeper,
)
from kcap.replay.timing.sampling import Budget, Timing, sample_until
from kcap.schemas.derive import bound_call
from kcap.schemas.derive.bound_call import Inputs
from kcap.schemas.results.measurement import AT_FLOOR, DISTURBED, NOTHING, Method

__all__ = ["clock_floor_us", "l2_bytes", "time_cuda"]


def time_call(
    device: str,
    call: Callable[..., Any],
    inputs: Inputs,
    rotation: Rotation,
    restored: list[bound_call.StorageKey],
    seconds: float,
    profiled: bool = False,
) -> Timing:
    """Time `call` on `inputs`, and on a GPU on the clones that `rotation` asks for.

    `restored`: the storages to restore before each sample. `seconds`: of sampling. `profiled`: on a GPU measure the
    durations of its kernels, too.
    """
    if uses_gpu(inputs):
        return time_cuda(call, inputs, rotation, restored, Budget.on(device, seconds), device, profiled)
    snapshot = InputSnapshot.of(inputs, restored)
    longest = MAX_LOOP_IN_PLACE if restored else MAX_LOOP
    return time_host(call, inputs, lambda: snapshot.restore([inputs]), Budget.on("cpu", seconds), longest)


def uses_gpu(inputs: Inputs) -> bool:
    """Whether a tensor is on a GPU or will be made there; anything else is the host's work."""
    values = [*inputs.args, *inputs.kwargs.values()]
    creates = any(isinstance(value, torch.device) and value.type == "cuda" for value in values)
    return creates or any(device.startswith("cuda") for device, _ in inputs.buffers)


MIN_SAMPLE_NS = 200_000  # far above the clock's resolution
MAX_LOOP = 100_000  # invocations in a sample
MAX_LOOP_IN_PLACE = 64  # halved this often, numbers are not yet denormal, which would be slow


def time_host(
    call: Callable[..., Any], inputs: Inputs, restore: Callable[[], None], budget: Budget, longest: int = MAX_LOOP
) -> Timing:
    """Times of `call` on one set of inputs, which stays in the caches (`warm`).

    `restore` runs before each sample, which has at most `longest` invocations: each sees what those before it wrote.
    """
    first = loop_ns(call, inputs, 1)
    if first > budget.most * 1e9:
        return Timing([first / 1e3], 1, "limit", "host", "cold", 1, ["one invocation alone"])
    restore()
    second = loop_ns(call, inputs, 1)
    n = min(max(MIN_SAMPLE_NS // max(second, 1), 1), longest)

    def take_sample() -> float:
        restore()
        return loop_ns(call, inputs, n) / n / 1e3

    before = preemptions()
    series = sample_until(take_sample, budget)
    notes = [DISTURBED] if preemptions() - before > len(series.samples) / 4 else []
    return Timing(series.samples, n, series.rule, "host", "warm", 1, notes)


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
MAX_QUEUED = 64  # invocations in one event pair: the GPU's queue takes 1,024 launches, then the host waits
ESTIMATE_ROUNDS = 3  # over all sets, to choose the graph's length: one may be disturbed
SHORT_RUN_US = 200.0  # below it, one run in an event pair is too short for an estimate


def time_cuda(
    call: Callable[..., Any],
    first: Inputs,
    rotation: Rotation,
    restored: list[bound_call.StorageKey],
    budget: Budget,
    device: str,
    profiled: bool = False,
) -> Timing:
    """Times of `call` on `first` and clones of it, on a separate stream; as in `time_call`."""
    stream = timing_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    reset_l2_persistence()
    with torch.cuda.stream(stream):
        floors = clock_floor_us(device)
        work, sets = prepare_work(call, first, rotation, restored, device)
        series = sample_until(work.sample, budget, is_slow=ClockWatch(device).slow)
        state = rotation.cache_state(sets, work.n, device)
        notes = work_notes(work)
        no_kernel = work.method == "graph" and median(series.samples) < floors["graph"] / 2  # none is that fast
        if no_kernel:
            return Timing([0.0], work.n, series.rule, "none", "warm", sets, [NOTHING], floor_us=floors["graph"])
        kernels, profile_notes = profile_kernels(work) if profiled else ([], [])
    torch.cuda.synchronize(device)
    floor = floors[work.method]
    notes += [AT_FLOOR] if median(series.samples) < 2 * floor else []
    return Timing(
        samples_us=series.samples,
        n=work.n,
        stop=series.rule,
        method=work.method,
        cache=state,
        input_sets=sets,
        notes=notes + profile_notes,
        poisoned=work.poisoned,
        floor_us=floor,
        slow=series.slow,
        kernels=kernels,
    )


def prepare_work(
    call: Callable[..., Any], first: Inputs, rotation: Rotation, restored: list[bound_call.StorageKey], device: str
) -> tuple[GpuWork, int]:
    """The work to time, and the number of input sets that it uses in turn."""
    snapshot, single = InputSnapshot.of(first, restored), RoundRobin(call, [first])
    estimate, sync_reason = warm_up(single, timing_stream(device), device)
    returned = single.result_bytes()
    single.drop_results()
    snapshot.restore([first])
    one_set = sync_reason is not None and not rotation.cold
    count = 1 if one_set else rotation.set_count(estimate, returned, memory.free_bytes(device), device)
    sets = [first, *(rotation.clone() for _ in range(count - 1))]
    results = rotation.results_kept(returned, len(sets), memory.free_bytes(device), device)
    new_round = partial(RoundRobin, call, sets, results)
    work = capture_work(new_round, sets, rotation, sync_reason, estimate, snapshot, device)
    return replace(work, cool_down=CoolDown(device).wait), len(sets)


@cache
def clock_floor_us(device: str) -> dict[Method, float]:
    """The time to add one to one number, by each method: no kernel that does work is faster."""
    stream = timing_stream(device)
    cell = torch.zeros(1, device=device)

    def run() -> None:
        cell.add_(1)

    estimate, _ = warm_up(run, stream, device)
    n = graph_length(estimate, 1)
    captured = GpuWork(capture_graph(run, n), n, do_nothing, stream, gpu_blocker(device))
    queued = GpuWork(repeat_run(run, MAX_QUEUED), MAX_QUEUED, do_nothing, stream, gpu_blocker(device))
    return {
        "graph": median(captured.sample() for _ in range(FLOOR_SAMPLES)),
        "events": median(queued.sample() for _ in range(FLOOR_SAMPLES)),
    }


def capture_work(
    new_round: Callable[[], Run],
    sets: list[Inputs],
    rotation: Rotation,
    sync_reason: str | None,
    estimate: float,
    snapshot: InputSnapshot,
    device: str,
) -> GpuWork:
    """A captured graph that uses `sets` in turn, or the same work launched behind a blocking kernel if it has no graph.

    A call that waits for the GPU itself (`sync_reason`) cannot be blocked, and is run once. `new_round` starts over
    with the first set, so that no result of an earlier graph stays alive.
    """
    stream = timing_stream(device)
    sweep = sweeper(device) if rotation.cold and rotation.size.touched else do_nothing

    def prepare() -> None:
        snapshot.restore(sets)
        sweep()

    def graph(n: int) -> GpuWork:
        memory.return_unused_memory(device)
        return GpuWork(capture_graph(new_round(), n), n, prepare, stream, gpu_blocker(device))

    if sync_reason:
        return GpuWork(new_round(), 1, prepare, stream, None, sync_reason)
    prepare()
    try:
        return graph(rotation.invocations(us_in_rotation(graph, len(sets), estimate), len(sets), device))
    except CaptureFailed as failure:
        torch.cuda.synchronize()
        n = min(invocations_in_a_replay(estimate), MAX_QUEUED)
        return GpuWork(repeat_run(new_round(), n), n, prepare, stream, gpu_blocker(device), str(failure), poisoned=True)


def us_in_rotation(graph: Callable[[int], GpuWork], sets: int, estimate: float) -> float:
    """Microseconds of one invocation in a `graph` that uses each of so many sets once, to choose the graph's length by.

    The `estimate`, made with one set in the caches, differs more from one process to the next. It is returned where
    there is only one set, or the graph to time uses each only once anyway.
    """
    if not 1 < sets < graph_length(estimate, 1):
        return estimate
    one_round = graph(sets)
    return min(one_round.sample() for _ in range(ESTIMATE_ROUNDS))


def repeat_run(run: Run, n: int) -> Run:
    def run_all() -> None:
        for _ in range(n):
            run()

    return run_all


def warm_up(run: Run, stream: torch.cuda.Stream, device: str) -> tuple[float, str | None]:
    """Run until lazy initialization is done: microseconds of one run, and why it waits for the GPU if it does."""
    blocker = gpu_blocker(device)
    blocker.reset()
    run()
    torch.cuda.synchronize(device)
    sync_reason = detect_sync(run)
    used = None if sync_reason else blocker
    single = timed_us(run, 1, do_nothing, stream, used)
    if sync_reason or single > SHORT_RUN_US:
        return single, sync_reason
    return timed_us(repeat_run(run, 8), 8, do_nothing, stream, used), None

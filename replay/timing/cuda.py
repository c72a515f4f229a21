"""Time an operator on a GPU: back-to-back time of a captured CUDA graph, or event pairs where none can be captured.

Back-to-back time has the gap between two graph nodes in it (about 1 µs); a profiler's kernel duration has not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from itertools import count
from statistics import median
from typing import Any

import torch

from kcap.replay.inputs import Inputs
from kcap.replay.timing.result import Timing
from kcap.replay.timing.stop import Budget, sample_until
from kcap.schemas.measurement import AT_FLOOR, NOTHING, Method

REPLAY_US = 1000.0  # the least that one graph replay lasts
MOST_NODES = 4000  # invocations in one graph
COLD_FACTOR = 5  # how many times the L2 the rotating inputs fill before they count as cold
MOST_SETS = 4000
MOST_BYTES = 4 << 30
FLOOR_SAMPLES = 11
DELAY_CYCLES = 200_000  # about 0.1 ms of spinning, in which the host queues the work behind it

Run = Callable[[], Any]


def sets_needed(set_bytes: int, touched: int, free_bytes: int, device: str) -> int:
    """How many sets it takes until one round touches five times the L2; one, if that many cannot be had."""
    needed = -(-COLD_FACTOR * l2_bytes(device) // max(touched, 1))
    affordable = min(MOST_BYTES, free_bytes // 4) // max(set_bytes, 1)
    return needed if needed <= min(affordable, MOST_SETS) else 1


@cache
def l2_bytes(device: str) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


@cache
def timing_stream(device: str) -> torch.cuda.Stream:
    """One stream for all: libraries keep a workspace for each stream that they have seen."""
    return torch.cuda.Stream(device)


def time_cuda(
    call: Callable[..., Any], sets: list[Inputs], touched: int, restore: Run, budget: Budget, device: str
) -> Timing:
    """Times of `call` over rotating `sets`, of each of which it touches `touched` bytes, on a stream of its own."""
    cold = len(sets) * touched >= COLD_FACTOR * l2_bytes(device)
    stream = timing_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    turn = rotating(call, sets)
    with torch.cuda.stream(stream):
        floors = floor_us(device)
        estimate = warm_up(turn, stream)
        restore()
        run, n, reason, spoiled = graph_or_events(turn, nodes(estimate, len(sets)), restore)
        samples, rule = sample_until(lambda: timed(run, n, restore, stream, delay=bool(reason)), budget)
    torch.cuda.synchronize(device)
    method: Method = "events" if reason else "graph"
    floor = floors[method]
    if method == "graph" and median(samples) < floor / 2:  # no kernel is that fast: the graph is empty
        return Timing([0.0], n, rule, "none", "warm", len(sets), [NOTHING], floor_us=floor)
    notes = [f"no CUDA graph: {reason}"] if reason else []
    notes += [AT_FLOOR] if median(samples) < 2 * floor else []
    return Timing(samples, n, rule, method, "cold" if cold else "warm", len(sets), notes, spoiled, floor)


@cache
def floor_us(device: str) -> dict[Method, float]:
    """What adding one to one number takes, by each method: nothing that does work is faster."""
    stream = timing_stream(device)
    cell = torch.zeros(1, device=device)

    def run() -> None:
        cell.add_(1)

    n = nodes(warm_up(run, stream), 1)
    graph = capture(run, n)
    times = [timed(graph, n, lambda: None, stream, delay=False) for _ in range(FLOOR_SAMPLES)]
    alone = [timed(run, 1, lambda: None, stream, delay=True) for _ in range(FLOOR_SAMPLES)]
    return {"graph": median(times), "events": median(alone)}


def graph_or_events(turn: Run, n: int, restore: Run) -> tuple[Run, int, str | None, bool]:
    """What to time and how many invocations it is; why it is no graph; whether a failed capture spoiled the process."""
    if reason := synchronizes(turn):
        return turn, 1, reason, False
    restore()
    try:
        return capture(turn, n), n, None, False
    except CaptureFailed as failure:
        torch.cuda.synchronize()
        return turn, 1, str(failure), True


def rotating(call: Callable[..., Any], sets: list[Inputs]) -> Run:
    """One invocation, each time on the next set."""
    turn = count()

    def run() -> None:
        inputs = sets[next(turn) % len(sets)]
        call(*inputs.args, **inputs.kwargs)

    return run


def nodes(estimate_us: float, sets: int) -> int:
    """Invocations in a graph that lasts a millisecond and uses every set equally often."""
    wanted = min(int(REPLAY_US / max(estimate_us, 0.5)) + 1, MOST_NODES)
    return -(-wanted // sets) * sets


def warm_up(run: Run, stream: torch.cuda.Stream) -> float:
    """Run three times, so that every lazy step is done; microseconds of the last."""
    run()
    run()
    return timed(run, 1, lambda: None, stream, delay=True)


def synchronizes(run: Run) -> str | None:
    """Why the operator cannot be captured: it waits for the GPU. A failed capture would spoil the process."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        return str(error).splitlines()[0][:120]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


class CaptureFailed(Exception):
    """The operator cannot be captured; torch is left in a state that no later capture survives."""


def capture(run: Run, n: int) -> Run:
    """A graph of `n` invocations on the current stream; what replays it."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    gc.disable()  # a collection that frees another graph's memory would end the capture
    try:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(n):
                run()
        finally:
            graph.capture_end()
    except RuntimeError as error:
        raise CaptureFailed(str(error).splitlines()[0][:120]) from None
    finally:
        gc.enable()
    graph.replay()
    return lambda: graph.replay()


def timed(run: Run, n: int, restore: Run, stream: torch.cuda.Stream, delay: bool) -> float:
    """Microseconds of one of the `n` invocations in `run`; `delay` keeps the GPU busy while the host queues them."""
    restore()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if delay and hasattr(torch.cuda, "_sleep"):
        torch.cuda._sleep(DELAY_CYCLES)
    start.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / n

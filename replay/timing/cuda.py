"""Time an operator on a GPU: back-to-back time of a captured CUDA graph, or event pairs where none can be captured.

Back-to-back time has the gap between two graph nodes in it (about 1 µs); a profiler's kernel duration has not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kcap.replay.inputs import Inputs
from kcap.replay.timing.result import Timing
from kcap.replay.timing.stop import Budget, sample_until

REPLAY_US = 1000.0  # the least that one graph replay lasts
MOST_NODES = 4000  # invocations in one graph
COLD_FACTOR = 5  # how many times the L2 the rotating inputs fill before they count as cold
MOST_SETS = 1024
MOST_BYTES = 4 << 30
DELAY_CYCLES = 200_000  # about 0.1 ms of spinning, in which the host queues the work behind it


def sets_needed(set_bytes: int, free_bytes: int, device: str) -> int:
    """How many sets of inputs fill the L2 five times over, within the memory that may be used."""
    goal = COLD_FACTOR * l2_bytes(device)
    affordable = min(MOST_BYTES, free_bytes // 4) // max(set_bytes, 1)
    return max(1, min(-(-goal // max(set_bytes, 1)), affordable, MOST_SETS))


def l2_bytes(device: str) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def time_cuda(
    call: Callable[..., Any],
    sets: list[Inputs],
    set_bytes: int,
    restore: Callable[[], None],
    budget: Budget,
    device: str,
) -> Timing:
    """Median time of `call` over rotating `sets`, on a stream of its own."""
    cold = len(sets) * set_bytes >= COLD_FACTOR * l2_bytes(device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    notes: list[str] = []
    with torch.cuda.stream(stream):
        estimate = warm_up(call, sets, stream)
        restore()
        try:
            n = min(max(len(sets), int(REPLAY_US / max(estimate, 0.5)) + 1), MOST_NODES)
            run = capture(call, sets, n, stream)
        except Exception as error:
            torch.cuda.synchronize(device)
            notes.append(f"no CUDA graph: {str(error).splitlines()[0][:120]}")
            run, n = eager(call, sets), 1
        samples, rule = sample_until(lambda: timed(run, n, restore, stream, delay=bool(notes)), budget)
    torch.cuda.synchronize(device)
    return Timing(
        samples,
        n,
        rule,
        "events" if notes else "graph",
        "cold" if cold else "warm",
        min(len(sets), n) if not notes else len(sets),
        notes,
    )


def warm_up(call: Callable[..., Any], sets: list[Inputs], stream: torch.cuda.Stream) -> float:
    """Run the first set three times, so that every lazy step is done; microseconds of the last."""
    for _ in range(2):
        call(*sets[0].args, **sets[0].kwargs)
    return timed(lambda: call(*sets[0].args, **sets[0].kwargs), 1, lambda: None, stream, delay=True)


def capture(call: Callable[..., Any], sets: list[Inputs], n: int, stream: torch.cuda.Stream) -> Callable[[], None]:
    """A graph of `n` invocations that go round the sets; what replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(n):
            inputs = sets[i % len(sets)]
            call(*inputs.args, **inputs.kwargs)
    graph.replay()
    return lambda: graph.replay()


def eager(call: Callable[..., Any], sets: list[Inputs]) -> Callable[[], None]:
    """One invocation without a graph, each time on the next set."""
    turn = iter(range(1 << 62))

    def run() -> None:
        inputs = sets[next(turn) % len(sets)]
        call(*inputs.args, **inputs.kwargs)

    return run


def timed(run: Callable[[], Any], n: int, restore: Callable[[], None], stream: torch.cuda.Stream, delay: bool) -> float:
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

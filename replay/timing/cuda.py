"""Time an operator on a GPU: back-to-back time of a captured CUDA graph, or event pairs where none can be captured.

Back-to-back time has the gap between two graph nodes in it (about 1 µs); a profiler's kernel duration has not, and is
of a pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from statistics import median
from typing import Any

import torch

from kcap.replay import memory
from kcap.replay.inputs import Inputs
from kcap.replay.timing import persisting
from kcap.replay.timing.blocking import blocker
from kcap.replay.timing.clocks import Watch
from kcap.replay.timing.graphs import CaptureFailed, Run, capture, nothing, synchronizes, timed, timing_stream
from kcap.replay.timing.pace import Pace
from kcap.replay.timing.result import Timing
from kcap.replay.timing.rotation import COLD_FACTOR, Rotation, in_a_replay, l2_bytes, nodes, sweeper
from kcap.replay.timing.saved import Saved
from kcap.replay.timing.stop import Budget, Sampled, sample_until
from kcap.replay.timing.turns import Turns
from kcap.replay.timing.work import Work, profile, said
from kcap.schemas.measurement import AT_FLOOR, NOTHING, KernelDuration, Method

__all__ = ["COLD_FACTOR", "floor_us", "l2_bytes", "time_cuda"]

FLOOR_SAMPLES = 11
MOST_QUEUED = 64  # invocations behind one event pair: the GPU's queue takes 1,024 launches, then the host waits
ROUNDS = 3  # over all sets, to choose the graph's length: one may be disturbed
SHORT_US = 200.0  # below it one event pair is no estimate


def time_cuda(
    call: Callable[..., Any],
    first: Inputs,
    rotation: Rotation,
    restored: list[memory.Key],
    budget: Budget,
    device: str,
    profiled: bool = False,
) -> Timing:
    """Times of `call` on `first` and clones of it, on a stream of its own; `restored`: the storages it writes to.

    `profiled`: its kernels' durations, too.
    """
    stream = timing_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    persisting.reset()
    with torch.cuda.stream(stream):
        floors = floor_us(device)
        work, sets = ready(call, first, rotation, restored, device)
        found = sample_until(work.sample, budget, slow=Watch(device).slow)
        state = rotation.reached(sets, work.n, device)
        notes = said(work)
        no_kernel = work.method == "graph" and median(found.samples) < floors["graph"] / 2  # none is that fast
        if no_kernel:
            return Timing([0.0], work.n, found.rule, "none", "warm", sets, [NOTHING], floor_us=floors["graph"])
        ran, lost = profile(work) if profiled else ([], [])
    torch.cuda.synchronize(device)
    floor = floors[work.method]
    notes += [AT_FLOOR] if median(found.samples) < 2 * floor else []
    return timing_of(found, work, notes + lost, state, sets, floor, ran)


def ready(
    call: Callable[..., Any], first: Inputs, rotation: Rotation, restored: list[memory.Key], device: str
) -> tuple[Work, int]:
    """What is timed, and over how many sets of inputs it goes."""
    saved, alone = Saved.of(first, restored), Turns(call, [first])
    estimate, waits = warm_up(alone, timing_stream(device), device)
    returned = alone.result_bytes()
    alone.let_go()
    saved.restore([first])
    more = 0 if waits and not rotation.cold else rotation.sets(estimate, returned, memory.free(device), device) - 1
    sets = [first, *(rotation.clone() for _ in range(more))]
    places = rotation.result_places(returned, len(sets), memory.free(device), device)
    made = prepared(partial(Turns, call, sets, places), sets, rotation, waits, estimate, saved, device)
    return replace(made, rest=Pace(device).rest), len(sets)


def timing_of(
    found: Sampled, work: Work, notes: list[str], state: Any, sets: int, floor: float, ran: list[KernelDuration]
) -> Timing:
    return Timing(
        found.samples, work.n, found.rule, work.method, state, sets, notes, work.spoiled, floor, found.slow, ran
    )


@cache
def floor_us(device: str) -> dict[Method, float]:
    """What adding one to one number takes, by each method: nothing that does work is faster."""
    stream = timing_stream(device)
    cell = torch.zeros(1, device=device)

    def run() -> None:
        cell.add_(1)

    estimate, _ = warm_up(run, stream, device)
    n = nodes(estimate, 1)
    graph = Work(capture(run, n), n, nothing, stream, blocker(device))
    alone = Work(repeated(run, MOST_QUEUED), MOST_QUEUED, nothing, stream, blocker(device))
    return {
        "graph": median(graph.sample() for _ in range(FLOOR_SAMPLES)),
        "events": median(alone.sample() for _ in range(FLOOR_SAMPLES)),
    }


def prepared(
    new_turns: Callable[[], Run],
    sets: list[Inputs],
    rotation: Rotation,
    waits: str | None,
    estimate: float,
    saved: Saved,
    device: str,
) -> Work:
    """A captured graph of turns over `sets`, or where they cannot be captured what takes them again and again, behind a
    held GPU; a call that waits for the GPU itself can neither be held back nor repeated without its waits.

    `new_turns` begins them anew, so that no result of an earlier graph lives on.
    """
    stream = timing_stream(device)
    sweep = sweeper(device) if rotation.cold and rotation.size.touched else nothing

    def before() -> None:
        saved.restore(sets)
        sweep()

    def graph(n: int) -> Work:
        memory.return_unused(device)
        return Work(capture(new_turns(), n), n, before, stream, blocker(device))

    if waits:
        return Work(new_turns(), 1, before, stream, None, waits)
    before()
    try:
        return graph(rotation.invocations(in_turns(graph, len(sets), estimate), len(sets), device))
    except CaptureFailed as failure:
        torch.cuda.synchronize()
        n = min(in_a_replay(estimate), MOST_QUEUED)
        return Work(repeated(new_turns(), n), n, before, stream, blocker(device), str(failure), spoiled=True)


def in_turns(graph: Callable[[int], Work], sets: int, estimate: float) -> float:
    """Microseconds of one invocation in a `graph` that goes once round so many sets; `estimate` as it is where there is
    one set, or a graph uses each only once.

    The length of the graph that is timed is chosen by it: a time with one set in the caches differs more from one
    process to the next.
    """
    if not 1 < sets < nodes(estimate, 1):
        return estimate
    once = graph(sets)
    return min(once.sample() for _ in range(ROUNDS))


def repeated(run: Run, n: int) -> Run:
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
    waits = synchronizes(run)
    held = None if waits else hold
    alone = timed(run, 1, nothing, stream, held)
    if waits or alone > SHORT_US:
        return alone, waits
    return timed(repeated(run, 8), 8, nothing, stream, held), None

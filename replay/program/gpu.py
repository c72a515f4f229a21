"""Time a Program on a GPU: captured in one CUDA graph, or in as few as can be where a Call between cannot be captured.

Where one of these waits for the GPU, or launches behind it outnumber what the GPU queues, the host's time is in the
result, which says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch

from kcap.replay.program.flow import Flow
from kcap.replay.program.found import Found, Shared, share_out
from kcap.replay.program.parts import Part, Parts
from kcap.replay.timing import kernels, persisting
from kcap.replay.timing.blocking import Sleep, blocker
from kcap.replay.timing.clocks import Watch
from kcap.replay.timing.cuda import repeated
from kcap.replay.timing.graphs import CaptureFailed, Run, capture, timed, timing_stream
from kcap.replay.timing.notes import GAVE_UP, HOST_IN_IT
from kcap.replay.timing.pace import Pace
from kcap.replay.timing.stop import FEWEST, Budget, sample_until

PROFILED = 3  # runs in the pass for kernel durations
LEAST_US = 1000.0  # that one sample lasts

Known = Mapping[int, Mapping[str, Any]]  # by Call, what it told when it ran alone: kcap.replay.program.alone.Alone


def time_on_gpu(order: Sequence[int], made: Parts, restore: Run, known: Known, budget: Budget, device: str) -> Found:
    """Microseconds of a run of `order` (Calls) from the first kernel's start to the last one's end, and durations."""
    flow, parts = Flow(made.activations), made.good
    stream = timing_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    persisting.reset()
    with torch.cuda.stream(stream):
        for part in parts.values():
            repeated(part.run, len(part.sets))()
        waits = any(known[call]["waits"] for call in parts)
        run, stretches, direct, failure = stretched(order, parts, flow, known, restore)
        hold = None if waits else fresh(blocker(device))
        alone = timed(run, 1, restore, stream, hold)
        n = max(1, round(LEAST_US / max(alone, 1.0))) if not direct else 1
        work = repeated(run, n)
        rested = InTurn([Pace(device).rest, restore])
        take = partial(timed, work, n, rested, stream, hold)
        sampled = sample_until(take, budget, slow=Watch(device).slow, fewest=FEWEST)
        shared, notes = profiled(run, rested, order, known)
    torch.cuda.synchronize(device)
    notes = [*said(direct, len(order), failure, waits, hold), *notes]
    return Found(sampled, n, "events" if direct else "graph", shared, stretches, notes, bool(failure))


def fresh(hold: Sleep) -> Sleep:
    """`hold`, used again where it gave up for another Call."""
    hold.reset()
    return hold


def stretched(
    order: Sequence[int], parts: dict[int, Part], flow: Flow, known: Known, restore: Run
) -> tuple[Run, int, int, str | None]:
    """What runs the Program; its graphs; how many invocations are in none of them; why no graph could be made."""
    runs: list[Run] = []
    graphs, direct = 0, 0
    restore()
    try:
        for captured, some in groupby(order, key=lambda call: known[call]["method"] == "graph"):
            stretch = InTurn([partial(flow.run, parts[call]) if captured else parts[call].run for call in some])
            runs.append(capture(stretch, 1) if captured else stretch)
            graphs += captured
            direct += 0 if captured else len(stretch.steps)
    except CaptureFailed as failure:
        torch.cuda.synchronize()
        return InTurn([parts[call].run for call in order]), 0, len(order), str(failure)
    return InTurn(runs), graphs, direct, None


class InTurn:
    """Does `steps` one after another."""

    def __init__(self, steps: Sequence[Callable[[], Any]]) -> None:
        self.steps = steps

    def __call__(self) -> None:
        for step in self.steps:
            step()


def said(direct: int, whole: int, failure: str | None, waits: bool, hold: Sleep | None) -> list[str]:
    """Why the Program is not one graph, if it is not, and whether the host's time is in what was measured."""
    why = f"no CUDA graph: {failure}" if failure else f"{direct} of {whole} invocations are in no CUDA graph"
    host = HOST_IN_IT if waits else GAVE_UP if hold and hold.gave_up else None
    return [*([why] if direct else []), *([host] if host else [])]


def profiled(run: Run, restore: Run, order: Sequence[int], known: Known) -> tuple[Shared, list[str]]:
    """The durations of every kernel of a run, given to the Calls."""
    runs = []
    try:
        for _ in range(PROFILED):
            restore()
            runs.append(kernels.plain(run))
    except (RuntimeError, AttributeError, AssertionError) as error:
        return Shared(), [f"no kernel durations: {str(error)[:120] or type(error).__name__}"]
    names = {call: dict(known[call]["kernels"]) for call in set(order)}
    shared = share_out(runs, order, names)
    if shared.total_us is None:
        return shared, ["no kernel durations: the profiler saw no kernel (is another one running?)"]
    lost = (shared.unmatched_us or 0) / shared.total_us if shared.total_us else 0
    return shared, [f"{lost:.1%} of the kernels' time could be given to no call"] if lost else []

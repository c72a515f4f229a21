"""Time a Program on the CPU with the host's clock: one invocation after another, the dispatch from Python included."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from kcap.replay.program.found import Found, Shared
from kcap.replay.program.parts import Part
from kcap.replay.program.restoring import Restoring
from kcap.replay.timing.host import preemptions
from kcap.replay.timing.stop import Budget, sample_until
from kcap.schemas.measurement import DISTURBED

PASSES = 3  # runs in which each invocation is timed by itself


def time_on_host(order: Sequence[int], parts: dict[int, Part], restore: Restoring, budget: Budget) -> Found:
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
    for _ in range(PASSES):
        restore()
        for call, part in invocations:
            start = time.perf_counter_ns()
            part.run()
            times[call].append((time.perf_counter_ns() - start) / 1e3)
    return Found(sampled, 1, "host", Shared({call: median(us) for call, us in times.items()}), notes=notes)

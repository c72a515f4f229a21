"""Time an operator on the CPU with the host's clock: back to back, the dispatch from Python included."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

from kcap.replay.inputs import Inputs
from kcap.replay.timing.result import Timing
from kcap.replay.timing.stop import Budget, sample_until
from kcap.schemas.measurement import DISTURBED

WINDOW_NS = 200_000  # the least that one sample lasts, far above the clock's resolution
LONGEST_LOOP = 100_000
LONGEST_IN_PLACE = 64  # halved this often, numbers are not yet denormal, which would be slow


def time_host(
    call: Callable[..., Any], inputs: Inputs, restore: Callable[[], None], budget: Budget, longest: int = LONGEST_LOOP
) -> Timing:
    """Median time of `call` on one set of inputs, which stays in the caches (`warm`).

    `restore` runs before each sample, so at most `longest` invocations see what those before them wrote.
    """
    first = loop(call, inputs, 1)
    if first > budget.most * 1e9:
        return Timing([first / 1e3], 1, "limit", "host", "cold", 1, ["one invocation alone"])
    restore()
    again = loop(call, inputs, 1)
    n = min(max(WINDOW_NS // max(again, 1), 1), longest)

    def take() -> float:
        restore()
        return loop(call, inputs, n) / n / 1e3

    before = preemptions()
    found = sample_until(take, budget)
    notes = [DISTURBED] if preemptions() - before > len(found.samples) / 4 else []
    return Timing(found.samples, n, found.rule, "host", "warm", 1, notes)


def preemptions() -> int:
    """How often other processes took the CPU away from this one."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def loop(call: Callable[..., Any], inputs: Inputs, n: int) -> int:
    """Nanoseconds of `n` invocations."""
    args, kwargs = inputs.args, inputs.kwargs
    start = time.perf_counter_ns()
    for _ in range(n):
        call(*args, **kwargs)
    return time.perf_counter_ns() - start

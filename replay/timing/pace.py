"""Rests that keep the GPU's power limit out of what is timed.

An engine's kernels run in bursts, at the full clock. Matrix products repeated without a rest draw more than the limit
allows, and after some fifty milliseconds the same kernel takes 15 % longer (seen on an H200). With a rest as long as
the sample before it the mean power stays well below the limit; where the clock falls all the same, the rests grow.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kcap.capture.nvml import sm_clock

HELD = 0.97  # of the highest clock that was seen: below it power or heat holds the GPU back
LEAST, MOST = 1.0, 16.0  # rests in times of the work before them
LONGEST_S = 0.5

_seen: dict[str, int] = {}  # by device, the highest SM clock in this process


class Pace:
    """The rests between the samples of one Call on `device`; they grow while the clock is held down.

    `read` gives the SM clock and its highest in MHz, or None.
    """

    def __init__(
        self,
        device: str,
        read: Callable[[str], tuple[int, int] | None] = sm_clock,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._device, self._read, self._now, self._sleep = device, read, now, sleep
        self._since: float | None = None
        self.factor = LEAST

    def rest(self) -> None:
        """Before a sample, when the GPU's work has ended: wait, unless it is the first."""
        if self._since is not None:
            worked = self._now() - self._since
            if self._held():
                self.factor = min(2 * self.factor, MOST)
            self._sleep(min(self.factor * worked, LONGEST_S))
        self._since = self._now()

    def _held(self) -> bool:
        found = self._read(self._device)
        if found is None:
            return False
        _seen[self._device] = max(found[0], _seen.get(self._device, 0))
        return found[0] < HELD * _seen[self._device]

"""Rests between the profiled steps, which let each run at the clock that the GPU has by itself.

After a long prefill the power limit holds the clock down: on an H200 the kernels of seven decode steps right after one
of 81 ms took 4 % longer than replayed, attention 12 %; those of seven after a pause took as long. Replay rests between
its samples, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

REST_S = 0.1  # the same for all: ranks that rest differently long wait for each other in their collectives


class Rests:
    """Those of the GPU that is current. What fails here is left out, and never raised.

    `capturing`: whether a CUDA graph is being captured in this process, where nothing may wait for the GPU.
    """

    def __init__(self, capturing: Callable[[], bool]) -> None:
        self._capturing = capturing

    def rest(self) -> None:
        """Before a step: let the GPU finish what it has, and rest."""
        if self._finished():
            time.sleep(REST_S)

    def sm_mhz(self) -> int | None:
        """After a step: the clock of its GPU's multiprocessors as its work ends; None where that cannot be told.

        NVML is opened by the first call, which takes some milliseconds.
        """
        if not self._finished():
            return None
        import torch

        from kcap.capture.nvml import sm_clock

        found = sm_clock(f"cuda:{torch.cuda.current_device()}")
        return found[0] if found else None

    def _finished(self) -> bool:
        """Wait for the GPU; False where there is none to wait for, or it must not be waited for."""
        import torch

        if not torch.cuda.is_initialized() or self._capturing() or torch.cuda.is_current_stream_capturing():
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # the engine's own work failed: it finds out by itself
            return False
        return True

"""Rests between the profiled steps, which let each run at the clock that the GPU has by itself.

After a long prefill the power limit holds the clock down: on an H200 the kernels of seven decode steps right after one
of 81 ms took 4 % longer than replayed, attention 12 %; those of seven after a pause took as long. Replay rests between
its samples, too.
"""

from __future__ import annotations

import time

REST_S = 0.1  # the same for all: ranks that rest differently long wait for each other in their collectives


def rest() -> None:
    """Before a step: let the GPU finish what it has, and rest."""
    if _finished():
        time.sleep(REST_S)


def clock() -> int | None:
    """After a step: its GPU's SM clock in MHz as its work ends; None where that cannot be told."""
    if not _finished():
        return None
    import torch

    from kcap.capture.nvml import sm_clock

    found = sm_clock(f"cuda:{torch.cuda.current_device()}")
    return found[0] if found else None


def _finished() -> bool:
    """Wait for the GPU; False where there is none to wait for, or a graph is being captured."""
    import torch

    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return False
    torch.cuda.synchronize()
    return True

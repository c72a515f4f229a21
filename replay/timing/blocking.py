"""A kernel that holds the GPU back until the host has queued the timed work, as nvbench's blocking kernel does.

Without it an event pair around a short kernel holds the host's launches. The kernel spins on a word in pinned host
memory and gives up after a second, so that work which waits for the GPU itself ends, and is told. Where torch cannot
compile one, the GPU sleeps for a fixed time instead.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

SPIN_TIMEOUT_MS = 1000
DELAY_CYCLES = 200_000  # about 0.1 ms of sleep, in which the host queues the work behind it
RELEASED_WORD, GAVE_UP_WORD = 0, 1  # words of the state
SPIN_SOURCE = r"""
extern "C" __global__ void kcap_hold(volatile int* state, int timeout_ms) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    const unsigned long long most = (unsigned long long)timeout_ms * 1000000ull;
    while (state[0] == 0) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (now - start > most) {
            state[1] = 1;
            return;
        }
    }
}
"""


class SleepHold:
    """The substitute: the GPU is busy for a while."""

    gave_up = False

    def reset(self) -> None:
        """Before another Call."""

    def hold(self) -> None:
        """Keep the current stream from what is queued next."""
        if hasattr(torch.cuda, "_sleep"):
            torch.cuda._sleep(DELAY_CYCLES)

    def release(self) -> None:
        """Let it go on."""


class SpinHold(SleepHold):
    """`kernel(grid, block, arguments)` is the compiled one, `state` two words of pinned memory.

    Once the kernel gave up it is not used again before the next `reset`.
    """

    def __init__(self, kernel: Any, state: torch.Tensor) -> None:
        self.kernel = kernel
        self.state = state
        self.words = state.numpy()
        self.gave_up = False

    def reset(self) -> None:
        self.gave_up = False

    def hold(self) -> None:
        self._look()
        if self.gave_up:
            return super().hold()
        self.words[:] = 0
        self.kernel((1, 1, 1), (1, 1, 1), [self.state, SPIN_TIMEOUT_MS])

    def release(self) -> None:
        self._look()
        self.words[RELEASED_WORD] = 1

    def _look(self) -> None:
        self.gave_up = self.gave_up or bool(self.words[GAVE_UP_WORD])


@cache
def blocker(device: str) -> SleepHold:
    """What holds back the work of `device`; tried once before it is used."""
    compiler = getattr(torch.cuda, "_compile_kernel", None)
    if compiler is None:
        return SleepHold()
    try:
        made = SpinHold(compiler(SPIN_SOURCE, "kcap_hold"), torch.zeros(2, dtype=torch.int32, pin_memory=True))
        made.hold()
        made.release()
        torch.cuda.synchronize(device)
    except (RuntimeError, OSError, ValueError, AttributeError, ImportError, TypeError):
        return SleepHold()
    return SleepHold() if made.words[GAVE_UP_WORD] else made

"""A kernel that blocks the GPU until the host has queued the timed work, as nvbench's blocking kernel does.

Without it, an event pair around a short kernel measures the host's launches. The kernel spins on a word in pinned host
memory and times out after a second, so that work which itself waits for the GPU ends, with a note. Where torch cannot
compile such a kernel, the GPU sleeps for a fixed time instead.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

SPIN_TIMEOUT_MS = 1000
DELAY_CYCLES = 200_000  # about 0.1 ms of sleep, in which the host queues the work behind it
RELEASED_WORD, TIMED_OUT_WORD = 0, 1  # words of the state
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


class SleepBlocker:
    """The substitute: the GPU sleeps for a fixed time."""

    timed_out = False

    def reset(self) -> None:
        """Forget a time-out, before the next Call."""

    def block(self) -> None:
        """Block what is queued next on the current stream."""
        if hasattr(torch.cuda, "_sleep"):
            torch.cuda._sleep(DELAY_CYCLES)

    def unblock(self) -> None:
        """Let the stream go on."""


class SpinBlocker(SleepBlocker):
    """Blocks by the compiled `kernel(grid, block, arguments)`; `state`: two words of pinned memory.

    After a time-out the kernel is not used until the next `reset`.
    """

    def __init__(self, kernel: Any, state: torch.Tensor) -> None:
        self.kernel = kernel
        self.state = state
        self.words = state.numpy()
        self.timed_out = False

    def reset(self) -> None:
        self.timed_out, self.words[TIMED_OUT_WORD] = False, 0

    def block(self) -> None:
        self._poll()
        if self.timed_out:
            return super().block()
        self.words[:] = 0
        self.kernel((1, 1, 1), (1, 1, 1), [self.state, SPIN_TIMEOUT_MS])

    def unblock(self) -> None:
        self._poll()
        self.words[RELEASED_WORD] = 1

    def _poll(self) -> None:
        self.timed_out = self.timed_out or bool(self.words[TIMED_OUT_WORD])


@cache
def gpu_blocker(device: str) -> SleepBlocker:
    """The blocker of `device`, after one trial."""
    compiler = getattr(torch.cuda, "_compile_kernel", None)
    if compiler is None:
        return SleepBlocker()
    try:
        blocker = SpinBlocker(compiler(SPIN_SOURCE, "kcap_hold"), torch.zeros(2, dtype=torch.int32, pin_memory=True))
        blocker.block()
        blocker.unblock()
        torch.cuda.synchronize(device)
    except (RuntimeError, OSError, ValueError, AttributeError, ImportError, TypeError):
        return SleepBlocker()
    return SleepBlocker() if blocker.words[TIMED_OUT_WORD] else blocker

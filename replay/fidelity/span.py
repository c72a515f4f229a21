"""From a step's first kernel to the end of its last, and how much of that the GPU lay idle for want of work."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from kcap.schemas.coverage import KernelTime, StepCoverage

# What is launched later than this before the GPU runs dry starts late: on an idle H200 a kernel started 8 to 20 µs
# after the host's call, under the profiler.
LAUNCH_US = 10.0


@dataclass(frozen=True)
class Span:
    """`us`: first start to last end. `waits_us`: of it, the gaps in which the GPU waited for the host to launch."""

    us: float
    waits_us: float

    @property
    def own_us(self) -> float:
        """What the GPU took by itself."""
        return self.us - self.waits_us


def span(step: StepCoverage) -> Span | None:
    """A step's span; None where it ran nothing, or its Recording has no starts (made before format 1.3)."""
    ended: list[tuple[KernelTime, float, float]] = []  # a kernel, its start, and when all up to it have ended
    for kernel in step.kernels:
        if kernel.start_us is None:
            return None
        end = kernel.start_us + kernel.us
        ended.append((kernel, kernel.start_us, max(end, ended[-1][2]) if ended else end))
    if not ended:
        return None
    waits = sum(_wait(before[2], kernel, start) for before, (kernel, start, _) in pairwise(ended))
    return Span(ended[-1][2] - ended[0][1], waits)


def _wait(dry: float, kernel: KernelTime, start: float) -> float:
    """The gap before `kernel`, whose host asked for it when the GPU was `dry` already, or about to be; else nothing."""
    late = kernel.launched_us is not None and kernel.launched_us > dry - LAUNCH_US
    return max(start - dry, 0.0) if late else 0.0

"""From a step's first kernel to the end of its last, and how much of that the GPU lay idle for want of work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from kcap.schemas.coverage import KernelTime, StepCoverage

# What is launched later than this before the GPU runs dry starts late: on an idle H200 a kernel started 8 to 20 µs
# after the host's call, under the profiler.
LAUNCH_US = 10.0
# What a GPU takes between two kernels whatever the host does, where too few of a kind's own gaps tell: "about a
# microsecond" between the nodes of a graph (README); on an H200 1.0 to 1.8 between kernels of a stream, profiled.
GAP_US = 1.0
FEWEST = 10  # gaps of which the median says anything
_Ended = tuple[KernelTime, float, float]  # a kernel, its start, and when all up to it have ended


@dataclass(frozen=True)
class Span:
    """`us`: first start to last end. `waits_us`: of it, what the GPU waited for the host to launch.

    A wait is what a gap has beyond `gap_us`, which the GPU takes in any case.
    """

    us: float
    waits_us: float
    gap_us: float = GAP_US

    @property
    def own_us(self) -> float:
        """What the GPU took by itself."""
        return self.us - self.waits_us


@dataclass(frozen=True)
class _Gap:
    """Before `kernel`: `us` from when the GPU ran `dry` to its start; negative where it started before that."""

    kernel: KernelTime
    dry: float
    us: float

    @property
    def late(self) -> bool:
        """Whether the host asked for the kernel when the GPU was dry already, or about to be."""
        launched = self.kernel.launched_us
        return launched is not None and launched > self.dry - LAUNCH_US

    @property
    def plain(self) -> bool:
        """Whether the GPU alone made it, between two kernels of a stream."""
        return self.us > 0 and not self.late and not self.kernel.graph and self.kernel.launched_us is not None


def span(step: StepCoverage, gap_us: float = GAP_US) -> Span | None:
    """A step's span; None where it ran nothing, or its Recording has no starts (made before format 1.3).

    `gap_us`: what the GPU takes between two kernels, as `own_gap` finds it.
    """
    ended = _ended(step)
    if not ended:
        return None
    waits = sum(max(gap.us - gap_us, 0.0) for gap in _gaps(ended) if gap.late)
    return Span(ended[-1][2] - ended[0][1], waits, gap_us)


def own_gap(steps: Sequence[StepCoverage]) -> float:
    """Microseconds that the GPU takes between two kernels of a stream: the median where the host was not late.

    Not of graphs, whose nodes follow closer than what the host launches; nor of kernels that start before the one
    before them has ended. GAP_US where fewer than ten are left.
    """
    known = [gap.us for step in steps for gap in _gaps(_ended(step)) if gap.plain]
    return median(known) if len(known) >= FEWEST else GAP_US


def _ended(step: StepCoverage) -> list[_Ended]:
    """Each kernel; nothing where a start is not known."""
    ended: list[_Ended] = []
    for kernel in step.kernels:
        if kernel.start_us is None:
            return []
        end = kernel.start_us + kernel.us
        ended.append((kernel, kernel.start_us, max(end, ended[-1][2]) if ended else end))
    return ended


def _gaps(ended: list[_Ended]) -> Iterator[_Gap]:
    for (_, _, dry), (kernel, start, _) in pairwise(ended):
        yield _Gap(kernel, dry, start - dry)

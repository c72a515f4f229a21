"""Work that is ready to be timed: a captured graph, or what runs behind a held GPU; and what to know of its times."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kcap.replay.timing import kernels
from kcap.replay.timing.blocking import Sleep
from kcap.replay.timing.graphs import Run, nothing, timed
from kcap.replay.timing.notes import GAVE_UP, HOST_IN_IT
from kcap.schemas.measurement import KernelDuration, Method

PROFILED = 3  # replays in the pass for kernel durations


@dataclass(frozen=True)
class Work:
    """What is timed: `run` does `n` invocations after `before`, behind `hold`; `reason`: why it is no graph.

    `hold` None: it waits for the GPU itself, and cannot be held back. `rest` comes before each sample.
    """

    run: Run
    n: int
    before: Run
    stream: torch.cuda.Stream
    hold: Sleep | None = None
    reason: str | None = None
    spoiled: bool = False
    rest: Run = nothing

    @property
    def method(self) -> Method:
        return "events" if self.reason else "graph"

    def sample(self) -> float:
        """Microseconds of one invocation."""
        self.rest()
        return timed(self.run, self.n, self.before, self.stream, self.hold)

    def durations(self) -> list[KernelDuration]:
        """The kernels of one invocation."""
        if self.reason:
            self.rest()
            self.before()
            return kernels.durations(kernels.plain(self.run), self.n)
        replays = kernels.graph_replays(self._profiled) or kernels.after(self.before, self._profiled, PROFILED)
        return kernels.durations([ran for replay in replays for ran in replay], self.n * len(replays))

    def _profiled(self) -> None:
        for _ in range(PROFILED):
            torch.cuda.synchronize()
            self.rest()
            self.before()
            self.run()


def said(work: Work) -> list[str]:
    """Why it is no graph, if it is none, and whether the host's time is in what was measured."""
    host = HOST_IN_IT if work.hold is None else GAVE_UP if work.hold.gave_up else None
    return [*([f"no CUDA graph: {work.reason}"] if work.reason else []), *([host] if host else [])]


def profile(work: Work) -> tuple[list[KernelDuration], list[str]]:
    """The kernels of one invocation, or a note that says why there are none."""
    try:
        ran = work.durations()
    except (RuntimeError, AttributeError, AssertionError) as error:
        return [], [f"no kernel durations: {str(error).splitlines()[0][:120] if str(error) else type(error).__name__}"]
    return ran, [] if ran else ["no kernel durations: the profiler saw no kernel (is another one running?)"]

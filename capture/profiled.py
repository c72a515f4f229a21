"""The steps that `--check-coverage` runs under torch's profiler before the counted ones, in the engine's process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

MOST_STEPS = 16
SPAN = "kcap:step:"  # as kcap.capture.coverage.trace reads it
ENDING = ".trace.json"


class Profile:
    """One profile of at most MOST_STEPS steps. `until`: it ends when this file is gone; None: after MOST_STEPS."""

    def __init__(self, output: Path, until: Path | None) -> None:
        self.steps = 0
        self._output = output
        self._until = until
        self._profiler: Any = None
        self._thread = 0
        self._span: Any = None

    @property
    def elsewhere(self) -> bool:
        """Whether the profiler runs on another thread: stopping it on this one crashes the process."""
        return self._profiler is not None and self._thread != threading.get_ident()

    @property
    def over(self) -> bool:
        """Whether the counted steps begin."""
        return self.steps >= MOST_STEPS if self._until is None else not self._until.exists()

    def begin(self) -> bool:
        """A step begins; False when it is not profiled any more."""
        if self.steps >= MOST_STEPS:
            self.finish()
            return False
        if self._profiler is None:
            self._profiler, self._thread = _start(), threading.get_ident()
        self.resume()
        return True

    def resume(self) -> None:
        import torch

        self._span = torch._C._profiler._RecordFunctionFast(f"{SPAN}{self.steps}")
        self._span.__enter__()

    def pause(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)

    def end(self) -> int:
        """The step is over; its number."""
        self.pause()
        self.steps += 1
        return self.steps - 1

    def give_up(self) -> None:
        """The profiler failed: what is left of these steps runs without it, and does not count either."""
        self.steps, self._profiler, self._span = MOST_STEPS, None, None

    def finish(self) -> None:
        """Stop the profiler, and write what it saw."""
        import torch

        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self.pause()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        profiler.stop()
        profiler.export_chrome_trace(str(self._output))


def _start() -> Any:
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    profiler.start()
    return profiler

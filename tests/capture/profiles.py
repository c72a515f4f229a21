"""Chrome traces by hand, and what kcap's analysis makes of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import orjson

from kcap.capture.fold.coverage import Attributed, ProfiledStep, Ran, Replayed, attribute, read_trace

MAIN, OTHER = 7, 8  # threads


class Profile:
    """A chrome trace by hand: operators with their times, launches in them, and what these ran on the GPU."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._correlation = 100

    def op(self, name: str, start: float, end: float, tid: int = MAIN, cat: str = "cpu_op") -> None:
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start})

    def step(self, index: int, start: float, end: float, tid: int = MAIN) -> None:
        self.op(f"kcap:step:{index}", start, end, tid, "user_annotation")

    def launch(self, at: float, *kernels: str, tid: int = MAIN, by: str = "cudaLaunchKernel", **more: Any) -> None:
        """Launch `kernels` at `at`, by a call of 1 µs; each takes 10 µs, 1,000 µs later."""
        self._correlation += 1
        args = {"correlation": self._correlation}
        cat = "cuda_driver" if by.startswith("cu") and not by.startswith("cuda") else "cuda_runtime"
        self.events.append({"ph": "X", "cat": cat, "name": by, "pid": 1, "tid": tid, "ts": at, "dur": 1, "args": args})
        for number, name in enumerate(kernels):
            self.gpu(name, at + 1000 + number, correlation=self._correlation, **more)

    def gpu(self, name: str, start: float, us: float = 10.0, cat: str = "kernel", **args: Any) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": start, "dur": us, "args": args}
        self.events.append(event)

    def attribute(self, *steps: ProfiledStep) -> list[Attributed]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            path.write_bytes(orjson.dumps({"traceEvents": self.events}))
            return attribute(read_trace(path), steps)

    def one(self, *items: Ran | Replayed) -> Attributed:
        (found,) = self.attribute(ProfiledStep(0, list(items)))
        return found


def calls(found: Attributed) -> dict[str, int | None]:
    return {kernel.name: kernel.call for kernel in found.kernels}


def reasons(found: Attributed) -> dict[str, str | None]:
    return {kernel.name: kernel.reason for kernel in found.kernels}


def differences(found: Attributed) -> list[tuple[str, int, int]]:
    return [(each.operator, each.profiled, each.recorded) for each in found.disagreements]

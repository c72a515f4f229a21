"""CUDA graphs of timed work, and event pairs around it. Everything runs on the current stream."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from kcap.replay.timing.blocking import Sleep

Run = Callable[[], Any]
REASON = 120  # characters


class CaptureFailed(Exception):
    """The work cannot be captured; torch is left in a state that no later capture survives."""


@cache
def timing_stream(device: str) -> torch.cuda.Stream:
    """One stream for all: libraries keep a workspace for each stream that they have seen."""
    return torch.cuda.Stream(device)


def nothing() -> None:
    """Nothing to do before a sample."""


def synchronizes(run: Run) -> str | None:
    """Why the work cannot be captured: it waits for the GPU. A failed capture would spoil the process."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        return str(error).splitlines()[0][:REASON]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def capture(run: Run, n: int) -> Run:
    """A graph of `n` runs; what replays it. Replayed once, so that it lies on the GPU."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    gc.disable()  # a collection that frees another graph's memory would end the capture
    try:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(n):
                run()
        finally:
            graph.capture_end()
    except RuntimeError as error:
        raise CaptureFailed(str(error).splitlines()[0][:REASON]) from None
    finally:
        gc.enable()
    graph.replay()
    return lambda: graph.replay()


def timed(run: Run, n: int, before: Run, stream: torch.cuda.Stream, hold: Sleep | None) -> float:
    """Microseconds of one of the `n` invocations in `run`; `hold` keeps the GPU back while the host queues them.

    `before` is queued ahead of them and not timed.
    """
    before()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if hold:
        hold.hold()
    try:
        start.record(stream)
        run()
        end.record(stream)
    finally:
        if hold:
            hold.release()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / n

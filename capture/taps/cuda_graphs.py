"""CUDA graphs: the calls inside a replayed graph are not recorded yet, so that they ran at all is counted and said."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import orjson


class Replays:
    """How many graphs were replayed while the window was open."""

    count = 0

    def line(self) -> bytes:
        detail = f"{self.count} replays of CUDA graphs ran, the calls inside them are not recorded: record with --eager"
        return orjson.dumps({"t": "tap", "name": "cuda_graphs", "status": "off", "detail": detail})


class HasOpen(Protocol):
    open: bool


def count_replays(window: HasOpen) -> Replays:
    """Count every `torch.cuda.CUDAGraph.replay` of this process from now on while `window` is open."""
    import torch

    replays = Replays()
    original = torch.cuda.CUDAGraph.replay

    @functools.wraps(original)
    def replay(graph: Any) -> Any:
        replays.count += window.open
        return original(graph)

    torch.cuda.CUDAGraph.replay = replay
    return replays

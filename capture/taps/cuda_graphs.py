"""CUDA graphs: the calls inside a replayed graph are not recorded yet, so that they ran at all is counted and said."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import orjson


class HasOpen(Protocol):
    open: bool


class Replays:
    """Counts every `torch.cuda.CUDAGraph.replay` of this process while `window` is open, until `stop`."""

    def __init__(self, window: HasOpen) -> None:
        self.count = 0
        self._window = window
        self._original: Callable[[Any], Any] | None = None

    def start(self) -> None:
        import torch

        original = self._original = torch.cuda.CUDAGraph.replay

        @functools.wraps(original)
        def replay(graph: Any) -> Any:
            self.count += self._window.open
            return original(graph)

        torch.cuda.CUDAGraph.replay = replay

    def stop(self) -> None:
        import torch

        if self._original is not None:
            torch.cuda.CUDAGraph.replay = self._original

    def line(self) -> bytes:
        """The shard's line that says how many there were."""
        detail = f"{self.count} replays of CUDA graphs ran, the calls inside them are not recorded: record with --eager"
        return orjson.dumps({"t": "tap", "name": "cuda_graphs", "status": "off", "detail": detail})

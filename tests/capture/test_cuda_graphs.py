"""Replays of CUDA graphs are counted while the window is open, and said."""

from __future__ import annotations

from types import SimpleNamespace

import orjson
import pytest
import torch

from kcap.capture.taps.cuda_graphs import Replays


def test_replays_are_counted_while_the_window_is_open_and_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: ran.append(graph))
    window = SimpleNamespace(open=False)
    replays = Replays(window)
    replays.start()
    torch.cuda.CUDAGraph.replay("before")  # type: ignore[arg-type]
    window.open = True
    torch.cuda.CUDAGraph.replay("one")  # type: ignore[arg-type]
    torch.cuda.CUDAGraph.replay("two")  # type: ignore[arg-type]
    replays.stop()
    torch.cuda.CUDAGraph.replay("after")  # type: ignore[arg-type]
    assert ran == ["before", "one", "two", "after"]
    assert replays.count == 2
    assert orjson.loads(replays.line())["detail"].startswith("2 replays")

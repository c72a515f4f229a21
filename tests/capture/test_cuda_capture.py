"""On a GPU: what the recorder does there breaks no capture of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kcap.schemas.recording.recording import Recording

Record = Callable[..., Recording]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")]


@torch.library.custom_op("kcaptest::looked_up", mutates_args=())
def looked_up(x: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    return x + block_table.sum()


def test_a_capture_inside_the_recording_is_left_whole(record: Record) -> None:
    x = torch.ones(300, device="cuda")
    table = torch.arange(6, device="cuda", dtype=torch.int32)
    looked_up(x, table)
    torch.cuda.synchronize()
    out: list[torch.Tensor] = []

    def body(_: Any) -> None:
        for size in (4, 200):  # the first sampled tensor of all comes in a capture; then some wait while one is on
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out.extend(looked_up(x[: i + 1], table) for i in range(size))
            graph.replay()
            for i in range(100):
                looked_up(torch.ones(i + 1, device="cuda"), table)
        torch.cuda.synchronize()

    recording = record(body)
    assert recording.metadata.complete
    assert all(y.eq(16).all() for y in out)
    held = [tensor for sample in recording.samples for tensor in sample.tensors.values()]
    assert held
    assert {(tensor.low, tensor.high) for tensor in held} == {(0, 5)}

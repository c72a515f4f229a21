"""What the driver needs of torch and CUDA on a GPU, taken before any Solution's code is in the process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

MAPS = Path("/proc/self/maps")
RUNTIME = re.compile(r"\S*/libcudart\.so[\d.]*$", re.MULTILINE)


def taken(device: str) -> tuple[str, tuple[Any, ...]]:
    """The file of CUDA's runtime that torch has loaded, and native/cuda.h's Torch; RuntimeError without a GPU."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    found = RUNTIME.search(MAPS.read_text())
    if found is None:
        raise RuntimeError("torch has loaded no CUDA runtime (libcudart) of its own")
    stream, c = torch.cuda.Stream(device), torch._C
    graph = c._CUDAGraph
    index = torch.device(device).index or 0
    usual = torch.cuda.default_stream(device)
    given = (
        index,
        stream.cuda_stream,
        c._cuda_setStream,
        _keywords(stream),
        _keywords(usual),
        torch.cuda.CUDAGraph,
        graph.capture_begin,
        graph.capture_end,
        graph.replay,
        c._cuda_sleep,
        stream,
    )
    return found[0], given


def _keywords(stream: torch.cuda.Stream) -> dict[str, int]:
    return {
        "stream_id": stream.stream_id,
        "device_index": stream.device_index,
        "device_type": stream.device_type,
    }

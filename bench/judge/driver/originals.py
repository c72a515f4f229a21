"""What is taken before any Solution's code is in the process: torch's and CUDA's handles, and names worth watching.

The watched names are those that a kernel has no reason to replace: clocks, events, and what results are compared with.
The judge uses none of them in a candidate's process. That one is not what it was is evidence, not a danger.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

MAPS = Path("/proc/self/maps")
RUNTIME = re.compile(r"\S*/libcudart\.so[\d.]*$", re.MULTILINE)


def gpu_handles(device: str) -> tuple[str, tuple[Any, ...]]:
    """The file of CUDA's runtime that torch has loaded, and native/cuda.h's Torch; RuntimeError without a GPU."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    runtime = RUNTIME.search(MAPS.read_text())
    if runtime is None:
        raise RuntimeError("torch has loaded no CUDA runtime (libcudart) of its own")
    stream, c = _stream(runtime[0], device), torch._C
    graph = c._CUDAGraph
    index = torch.device(device).index or 0
    usual = torch.cuda.default_stream(device)
    handles = (
        index,
        stream.cuda_stream,
        c._cuda_setStream,
        _stream_keywords(stream),
        _stream_keywords(usual),
        torch.cuda.CUDAGraph,
        graph.capture_begin,
        graph.capture_end,
        graph.replay,
        c._cuda_sleep,
        c._cuda_emptyCache,
        stream,
    )
    return runtime[0], handles


def _stream(runtime: str, device: str) -> torch.cuda.Stream:
    """A stream that the default one waits for, unlike torch's own: while it captures, CUDA refuses what is launched on
    the default stream, which would be missing from the graph."""
    handle = ctypes.c_void_p()
    if failed := ctypes.CDLL(runtime).cudaStreamCreate(ctypes.byref(handle)):
        raise RuntimeError(f"no stream for CUDA graphs: CUDA error {failed}")
    stream: torch.cuda.Stream = torch.cuda.ExternalStream(handle.value, device)
    return stream


def _stream_keywords(stream: torch.cuda.Stream) -> dict[str, int]:
    return {
        "stream_id": stream.stream_id,
        "device_index": stream.device_index,
        "device_type": stream.device_type,
    }


WATCHED: tuple[tuple[Any, str], ...] = (
    (time, "time perf_counter perf_counter_ns monotonic monotonic_ns process_time time_ns"),
    (statistics, "mean median fmean quantiles"),
    (torch, "equal allclose isclose empty empty_like zeros randn rand randint from_numpy"),
    (torch.testing, "assert_close"),
    (torch.Tensor, "cpu cuda to copy_ clone data_ptr contiguous equal allclose numpy item shape dtype __eq__"),
    (torch.cuda, "synchronize current_stream Event Stream CUDAGraph graph"),
    (torch.cuda.Event, "record elapsed_time synchronize query"),
    (torch.cuda.CUDAGraph, "replay capture_begin capture_end"),
    (builtins, "abs all any max min sum isinstance type len float print"),
    (gc, "get_objects"),
    (sys, "setprofile settrace"),
)

Watched = tuple[tuple[Any, str, Any, str], ...]


def watched_originals() -> Watched:
    """What the watched names stand for now: owner, attribute, value, and its full name."""
    return tuple(
        (owner, name, getattr(owner, name), f"{_full_name(owner)}.{name}")
        for owner, names in WATCHED
        for name in names.split()
        if hasattr(owner, name)
    )


def _full_name(owner: Any) -> str:
    if not isinstance(owner, type):
        return str(owner.__name__)
    return "torch.Tensor" if owner is torch.Tensor else f"torch.cuda.{owner.__name__}"

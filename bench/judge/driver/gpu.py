"""CUDA's and torch's handles for the driver, taken before any Solution's code is in the process."""

from __future__ import annotations

import ctypes
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

MAPS = Path("/proc/self/maps")
RUNTIME = re.compile(r"\S*/libcudart\.so[\d.]*$", re.MULTILINE)
NON_BLOCKING = 1  # cudaStreamNonBlocking


def gpu_handles(device: str, driver: Path) -> tuple[str, tuple[Any, ...]]:
    """The file of CUDA's runtime that torch has loaded, and native/cuda.h's Torch; RuntimeError without a GPU.

    `driver`: the library that pools of outputs have their memory from.
    """
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    runtime = RUNTIME.search(MAPS.read_text())
    if runtime is None:
        raise RuntimeError("torch has loaded no CUDA runtime (libcudart) of its own")
    stream, first, c = _stream(runtime[0], device, 0), _stream(runtime[0], device, NON_BLOCKING), torch._C
    graph = c._CUDAGraph
    index = torch.device(device).index or 0
    usual = torch.cuda.default_stream(device)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(driver), "kcap_take", "kcap_give_back")
    handles = (
        index,
        stream.cuda_stream,
        first.cuda_stream,
        c._cuda_setStream,
        _stream_keywords(stream),
        _stream_keywords(first),
        _stream_keywords(usual),
        torch.cuda.CUDAGraph,
        graph.capture_begin,
        graph.capture_end,
        graph.replay,
        c._cuda_emptyCache,
        partial(torch.cuda.MemPool, allocator.allocator()),
        c._cuda_beginAllocateCurrentThreadToPool,
        c._cuda_endAllocateToPool,
        c._cuda_releasePool,
        stream,  # these live on with it
        first,
        allocator,
    )
    return runtime[0], handles


def _stream(runtime: str, device: str, flags: int) -> torch.cuda.Stream:
    """A stream; without flags one that the default stream waits for, unlike torch's own.

    While that captures, CUDA refuses what is launched on the default stream, which would be missing from the graph.
    """
    handle = ctypes.c_void_p()
    if failed := ctypes.CDLL(runtime).cudaStreamCreateWithFlags(ctypes.byref(handle), flags):
        raise RuntimeError(f"no stream for CUDA graphs: CUDA error {failed}")
    stream: torch.cuda.Stream = torch.cuda.ExternalStream(handle.value, device)
    return stream


def _stream_keywords(stream: torch.cuda.Stream) -> dict[str, int]:
    return {
        "stream_id": stream.stream_id,
        "device_index": stream.device_index,
        "device_type": stream.device_type,
    }

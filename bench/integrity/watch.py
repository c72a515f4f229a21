"""Names that a kernel has no reason to replace: clocks, events, and what results are compared with.

The judge uses none of them in a candidate's process. That one is not what it was is evidence, not a danger.
"""

from __future__ import annotations

import builtins
import gc
import statistics
import sys
import time
from typing import Any

import torch

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


def taken() -> Watched:
    """What the watched names stand for now: owner, attribute, value, and its full name."""
    return tuple(
        (owner, name, getattr(owner, name), f"{_called(owner)}.{name}")
        for owner, names in WATCHED
        for name in names.split()
        if hasattr(owner, name)
    )


def _called(owner: Any) -> str:
    if not isinstance(owner, type):
        return str(owner.__name__)
    return "torch.Tensor" if owner is torch.Tensor else f"torch.cuda.{owner.__name__}"

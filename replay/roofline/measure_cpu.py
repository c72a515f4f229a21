"""A CPU's ceilings, by the host's clock: the best of several kinds of work, each the best of many runs.

A busy machine seldom lets all threads run at once. So one thread is measured, too, in pieces too short to be disturbed,
and its rate times the number of threads is the ceiling if it is higher.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from kcap.replay.rebuild import memory
from kcap.replay.roofline.ceilings import descending_levels

Work = Callable[[], Any]

# Three 64-byte accesses in each cycle of 6 GHz: no core moves more, even from its nearest cache
NEAREST_GB_S = 3 * 64 * 6.0
SMALLEST, LARGEST, STEP = 1 << 18, 1 << 29, 4  # bytes of the working sets
PIECE = 1 << 22  # bytes at once, so few that other processes leave some pieces undisturbed
MIN_SECONDS = 0.05
SHARING_CACHE, SHARING_MEMORY = 1 << 16, 4  # threads whose bandwidths add up: any number in caches, 4 in memory
MATRICES = (256, 512)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
LAST_LEVEL = 32 << 20  # bytes, where the system does not tell


def measure() -> dict[str, Any]:
    """The fields of Ceilings that are measured, for as many threads as torch uses."""
    threads, cell = torch.get_num_threads(), torch.zeros(1)
    together = {size: bandwidth(size) for size in sizes()}
    torch.set_num_threads(1)
    alone = {size: bandwidth(size) * min(threads, sharing(size)) for size in together}
    rates = {str(dtype).removeprefix("torch."): threads * arithmetic(dtype) for dtype in DTYPES}
    empty = best([partial(cell.add_, 1)])
    torch.set_num_threads(threads)
    measured = [(0, NEAREST_GB_S * threads), *((size, max(together[size], alone[size])) for size in together)]
    return {
        "levels": [level.model_dump() for level in descending_levels(measured)],
        "tflop_s": rates,
        "cache_bytes": last_level(),
        "empty_us": empty * 1e6,
    }


def sharing(size: int) -> int:
    """How many threads multiply the bandwidth of one over a working set of `size` bytes, at best."""
    return SHARING_MEMORY if size > last_level() else SHARING_CACHE


def sizes() -> Iterator[int]:
    """Working sets from within a core's caches to main memory, as far as memory allows."""
    size = SMALLEST
    while size <= min(LARGEST, memory.free_bytes("cpu") // 4):
        yield size
        size *= STEP


def bandwidth(size: int) -> float:
    """GB/s over a working set of `size` bytes, copying or reading it piece by piece; the best piece."""
    buffer = torch.ones(size // 4)
    source, target = buffer.chunk(2)
    count = max(size // PIECE, 1)
    copies = [
        partial(target_chunk.copy_, source_chunk)
        for source_chunk, target_chunk in zip(source.chunk(count), target.chunk(count), strict=True)
    ]
    reads = [part.sum for part in buffer.chunk(count)]
    return size / count / min(best(copies), best(reads)) / 1e9


def arithmetic(dtype: torch.dtype) -> float:
    """TFLOP/s of a product of random square matrices."""
    return max(2 * n**3 / best([product(n, dtype)]) / 1e12 for n in MATRICES)


def product(n: int, dtype: torch.dtype) -> Work:
    a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
    return partial(torch.mm, a, b, out=torch.empty(n, n, dtype=dtype))


def best(works: Sequence[Work]) -> float:
    """Seconds of the fastest of `works`, which take turns, two rounds at least."""
    for work in works:
        work()
    times: list[float] = []
    while sum(times) < MIN_SECONDS or len(times) < 2 * len(works):
        start = time.perf_counter()
        works[len(times) % len(works)]()
        times.append(time.perf_counter() - start)
    return min(times)


def last_level() -> int:
    """Bytes of the last-level cache."""
    names = [name for name in ("SC_LEVEL4_CACHE_SIZE", "SC_LEVEL3_CACHE_SIZE") if name in os.sysconf_names]
    return next((size for name in names if (size := os.sysconf(name)) > 0), LAST_LEVEL)

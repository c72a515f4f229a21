"""A GPU's ceilings, by its own events: many invocations in one CUDA graph, the best of several replays.

The bandwidth of the L2 is a slope, the additional bytes of a larger working set over its additional time, so that the
start of a kernel does not count. Products are of random matrices: zeros take less power and are faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from kcap.replay.roofline.ceilings import TF32, descending_levels

Work = Callable[[], Any]
SMALL_PART, LARGE_PART = 8, 2  # of the L2: an eighth, half
BEYOND = (2, 4, 16)  # times the L2
MIN_REPLAY_US = 2000.0  # that one replay of a graph lasts
MAX_NODES = 500
REPLAYS = 8
MATRICES = (4096, 8192)
MAX_PRODUCT_US = 100_000.0
PRECISIONS = {"float32": "highest", TF32: "high"}


def measure(device: str) -> dict[str, Any]:
    """The fields of Ceilings that are measured."""
    l2 = int(torch.cuda.get_device_properties(device).L2_cache_size)
    cell = torch.zeros(1, device=device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        near = in_cache(l2 // SMALL_PART, l2 // LARGE_PART, device)
        far = [(size, bandwidth(size, device)) for size in beyond(l2, device)]
        rates = dict(arithmetic(device))
        empty = graph_us(lambda: cell.add_(1))
    return {
        "levels": [level.model_dump() for level in descending_levels([(0, near), *far])],
        "tflop_s": rates,
        "cache_bytes": l2,
        "empty_us": empty,
    }


def beyond(l2: int, device: str) -> list[int]:
    """Working sets larger than the L2, as far as memory allows."""
    free = torch.cuda.mem_get_info(device)[0]
    return [l2 * times for times in BEYOND if l2 * times < free // 4] or [l2]


def works(size: int, device: str) -> list[Work]:
    """Work that moves `size` bytes over a working set of that size: copies (by two kernels), a read, a write."""
    buffer = torch.randn(size // 8 * 2, device=device)
    source, target = buffer.chunk(2)
    total = torch.empty((), device=device)
    return [
        lambda: target.copy_(source),
        lambda: torch.neg(source, out=target),
        lambda: torch.sum(buffer, dim=0, out=total),
        lambda: buffer.fill_(1.0),
    ]


def bandwidth(size: int, device: str) -> float:
    """GB/s over a working set of `size` bytes."""
    return size / min(graph_us(work) for work in works(size, device)) / 1e3


def in_cache(small: int, large: int, device: str) -> float:
    """GB/s of the L2, at best; working sets of both sizes fit into it."""
    pairs = zip(works(small, device), works(large, device), strict=True)
    return max(
        slope(large - small, graph_us(small_work), graph_us(large_work), large) for small_work, large_work in pairs
    )


def slope(bytes_more: int, less_us: float, more_us: float, large: int) -> float:
    """GB/s by the difference of two working sets; of the `large` one as a whole if it took no longer."""
    return (bytes_more / (more_us - less_us) if more_us > less_us else large / more_us) / 1e3


def arithmetic(device: str) -> Iterator[tuple[str, float]]:
    """TFLOP/s of each dtype that torch multiplies matrices of here."""
    for name, make in {**FLOATS, **QUANTIZED}.items():
        torch.set_float32_matmul_precision(PRECISIONS.get(name, "highest"))
        with suppress(RuntimeError, AttributeError, NotImplementedError):  # this GPU or this torch has none
            yield name, fastest(make, device)


def fastest(make_product: Callable[[int, str], Work], device: str) -> float:
    """The best over matrices of several sizes; larger ones only while a product stays short."""
    rates: list[float] = []
    for n in MATRICES:
        if rates and 2 * n**3 / rates[-1] / 1e6 > MAX_PRODUCT_US:
            break
        rates.append(2 * n**3 / event_us(make_product(n, device)) / 1e6)
    return max(rates)


def product(dtype: torch.dtype) -> Callable[[int, str], Work]:
    def make(n: int, device: str) -> Work:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        out = torch.empty(n, n, dtype=dtype, device=device)
        return lambda: torch.mm(a, b, out=out)

    return make


def float8(n: int, device: str) -> Work:
    """A product with the second matrix in column order, as the operator requires."""
    a, b = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    unit = torch.ones((), device=device)
    options = {"scale_a": unit, "scale_b": unit, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return lambda: torch._scaled_mm(a, b.t(), **options)


def int8(n: int, device: str) -> Work:
    a, b = (torch.randint(-128, 128, (n, n), dtype=torch.int8, device=device) for _ in range(2))
    return lambda: torch._int_mm(a, b.t())


FLOATS = {
    "float64": product(torch.float64),
    "float32": product(torch.float32),
    TF32: product(torch.float32),
    "bfloat16": product(torch.bfloat16),
    "float16": product(torch.float16),
}
QUANTIZED: dict[str, Callable[[int, str], Work]] = {"float8_e4m3fn": float8, "int8": int8}


def graph_us(work: Work) -> float:
    """Microseconds of one of many invocations, captured on the current stream."""
    n = max(min(int(MIN_REPLAY_US / event_us(work)) + 1, MAX_NODES), 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(n):
            work()
    return event_us(graph.replay) / n


def event_us(work: Work) -> float:
    """Microseconds of `work` on the current stream, the best of several times."""
    work()
    return min(timed(work) for _ in range(REPLAYS))


def timed(work: Work) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return max(float(start.elapsed_time(end)) * 1e3, 0.01)

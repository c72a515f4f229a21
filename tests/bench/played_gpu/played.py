"""A GPU that is not there: memory is the host's, a kernel is a Python function, a graph does again what it captured."""

from __future__ import annotations

import ctypes
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

RUNTIME = os.environ["PLAYED_RUNTIME"]
Kernel = partial[None]
calls: list[Kernel] = []
captured: list[Graph] = []
waiting: list[Any] = []
Later = ctypes.CFUNCTYPE(None)
DEFAULT, OWN, ORIGIN = range(3)  # streams; OWN blocks the first
current = [DEFAULT]
library = ctypes.PyDLL(os.environ["PLAYED_TENSORS"])
runtime = ctypes.CDLL(RUNTIME, mode=ctypes.RTLD_GLOBAL)
runtime.waits.restype = ctypes.c_bool
library.made.restype, library.made.argtypes = ctypes.py_object, [ctypes.c_long, ctypes.c_long]


class Graph:
    first = 0
    work: list[Kernel] = []


class Pool:
    id = "pool"

    def __del__(self) -> None:
        library.give_back()


def empty_like(x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = library.made(*x.shape)
    return made


def double(x: torch.Tensor, y: torch.Tensor, seconds: float = 0.0001) -> None:
    """Launch what doubles `x` into `y` and takes so long."""
    calls.append(partial(_double, numbers(x), numbers(y), seconds))
    calls[-1]()
    if not captured:
        runtime.launch()


def taken(device: str, driver: Path) -> tuple[str, tuple[Any, ...]]:
    """As kcap.bench.judge.driver.gpu has it."""
    loaded = ctypes.CDLL(str(driver))
    library.use(loaded.kcap_take, loaded.kcap_give_back)
    streams = ({"stream": one} for one in (OWN, ORIGIN, DEFAULT))
    graphs = Graph, _begin, _end, _replay
    return RUNTIME, (0, OWN, ORIGIN, _set_stream, *streams, *graphs, _nothing, Pool, *3 * [_nothing])


def numbers(tensor: torch.Tensor) -> numpy.ndarray[Any, Any]:
    return numpy.ctypeslib.as_array((ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr()))


def _double(x: Any, y: Any, seconds: float) -> None:
    y[:] = 2 * x
    _spin(seconds)


def _spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def _set_stream(stream: int) -> None:
    current[:] = [stream]


def _nothing(*_: object) -> None:
    pass


def _begin(graph: Graph, pool: str, mode: str) -> None:
    """torch waits for the default stream when the capture has begun."""
    if current != [ORIGIN]:
        raise RuntimeError("disallowed implicit dependency on a current capture sequence")
    captured.append(graph)
    runtime.capture(1)
    graph.first = len(calls)


def _end(graph: Graph) -> None:
    if current != [ORIGIN]:
        raise RuntimeError("the capture was initiated in a different stream")
    graph.work = calls[graph.first :]
    captured.clear()
    runtime.capture(0)


def _replay(graph: Graph) -> None:
    def work() -> None:
        for one in graph.work:
            one()
        runtime.launch()

    if runtime.waits():
        waiting.append(Later(work))
        runtime.later(waiting[-1])
    else:
        waiting.clear()
        work()

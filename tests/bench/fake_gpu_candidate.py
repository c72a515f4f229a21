"""Candidates on a GPU that is not there: `python fake_gpu_candidate.py CONTROL LIBRARY` forks them.

Tensors say that they are on a GPU, and lie in host memory: what one runs doubles them by their addresses. A graph
remembers what was called while it was captured, and does it again.
"""

from __future__ import annotations

import ctypes
import sys
import time
from functools import partial

import numpy
import torch
from forked_candidates import serve_all

from kcap.bench.judge.driver import driver

calls, captured, kept = [], [], []


def floats(tensor):
    """The numbers of a tensor that torch thinks is elsewhere."""
    at = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return numpy.ctypeslib.as_array(at)


def double(x, y):
    calls.append(partial(fill, floats(x), floats(y)))
    calls[-1]()


def fill(x, y):
    y[:] = 2 * x
    time.sleep(0.0002)


def double_once(x, y):
    if len(calls) < 3:
        double(x, y)


def double_changing_the_last(x, y):
    double(x, y)
    floats(x)[-1] = 0


def double_in_place(x, y):
    floats(x)[:] = 0
    double(x, y)


def refuses_capture(x, y):
    if captured:
        raise RuntimeError("operation not permitted when stream is capturing")
    double(x, y)


def made_at_first_call(x, y):
    if captured and not calls:
        raise RuntimeError("compiled while the stream was capturing")
    double(x, y)


def same_memory(x):
    """Returns the memory of the first input ever, which holds the result of the latest call."""
    kept.append(x)
    calls.append(partial(fill, floats(x), floats(kept[0])))
    calls[-1]()
    return kept[0]


def reserves(x, y):
    ctypes.CDLL(sys.argv[2]).cudaDeviceSetLimit(6, 1 << 20)
    double(x, y)


class Graph:
    work: list = []


def begin(graph, pool, mode):
    assert pool is None and mode == "thread_local"
    captured.append(graph)
    graph.first = len(calls)


def end(graph):
    graph.work = calls[graph.first :]
    captured.clear()


def replay(graph):
    for work in graph.work:
        work()


def main():
    control, library = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    loaded = driver.Driver(driver.build_driver())
    given = (
        0,
        0,
        lambda **which: None,
        {"own": 1},
        {"own": 0},
        Graph,
        begin,
        end,
        replay,
        lambda: None,
    )

    def serve(channel, report, what):
        loaded.use_gpu(library, given)
        loaded.serve(channel, report, globals()[what])

    with torch.no_grad():
        serve_all(control, serve)


main()

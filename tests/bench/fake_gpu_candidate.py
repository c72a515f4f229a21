"""Candidates that run a function of it on a GPU, played or real: `python fake_gpu_candidate.py CONTROL played`."""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from forked_candidates import serve_all

from kcap.bench.judge.driver import driver, protocol

sys.path.append(str(Path(__file__).with_name("played_gpu")))
played = importlib.import_module(sys.argv[2])

SECONDS, KEPT, CHANNEL = 0.0002, [], []


def double(x, y):
    played.double(x, y, SECONDS)


def doubled(x):
    y = played.empty_like(x)
    double(x, y)
    return y


def raises_at_first(x):
    """When the kernel has been launched."""
    y = doubled(x)
    if len(played.calls) == 1:
        raise RuntimeError("no more")
    return y


def refused_memory(call, x):
    """By the n-th call of CUDA's that makes, maps, allows or exports memory."""
    played.runtime.refuse(call)
    return doubled(x)


unmapped, forbidden, unshared = (partial(refused_memory, call) for call in (2, 3, 4))


def double_once(x, y):
    if len(played.calls) < 3:
        double(x, y)


def double_changing_the_last(x, y):
    double(x, y)
    played.numbers(x)[-1] = 0


def double_in_place(x, y):
    played.numbers(x)[:] = 0
    double(x, y)


def refuses_capture(x, y):
    if played.captured:
        raise RuntimeError("operation not permitted when stream is capturing")
    double(x, y)


def made_at_first_call(x, y):
    if played.captured and not played.calls:
        raise RuntimeError("compiled while the stream was capturing")
    double(x, y)


def same_memory(x):
    """Returns the memory of the first input ever, which holds the result of the latest call."""
    KEPT.append(x)
    double(x, KEPT[0])
    return KEPT[0]


def reserves(x, y):
    played.runtime.cudaDeviceSetLimit(6, ctypes.c_size_t(1 << 20))
    double(x, y)


def forges_a_piece(x):
    """Says of a file that it is memory of the GPU."""
    with socket.socket(fileno=os.dup(CHANNEL[0])) as channel, tempfile.TemporaryFile() as file:
        socket.send_fds(channel, [protocol.PIECE.pack(1 << 40, 1 << 20)], [file.fileno()])
    return doubled(x)


def sends_nonsense(x):
    """Words of another length, each with two descriptors."""
    with socket.socket(fileno=os.dup(CHANNEL[0])) as channel, tempfile.TemporaryFile() as file:
        for _ in range(20):
            socket.send_fds(channel, [b"words"], [file.fileno(), file.fileno()])
    return doubled(x)


def main():
    loaded = driver.Driver(driver.build_driver())

    def serve(channel, report, what):
        CHANNEL.append(channel)
        loaded.use_gpu(*played.taken("cuda:0", loaded.path))
        loaded.serve(channel, report, globals()[what])

    with torch.no_grad():
        serve_all(int(sys.argv[1]), serve)


main()

"""Candidates on the CPU: `python cpu_candidate.py CONTROL` forks those that run one of the functions here."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

import torch
from forked_candidates import serve_all

from kcap.bench.judge.driver import driver

KEPT = []


def copied(x):
    return x.clone()


def turned(x):
    return x.T


def turned_in_a_row(x):
    return x.T.contiguous()


def negated(x):
    return -x


def negated_view(x):
    return torch._neg_view(x)


def padded(x):
    out = torch.empty(x.shape[0], x.shape[1] + 4)[:, : x.shape[1]]
    return out.copy_(x)


def called(x):
    raise RuntimeError("it was called")


def called_thrice(x):
    KEPT.append(x)
    if len(KEPT) % 3 == 0:
        raise RuntimeError("a third time")
    return x.clone()


def mutated(x):
    x.view(-1)[-1] += 1
    return x.clone()


def earlier(x):
    """What a kept input reads as, later."""
    KEPT.append(x)
    return KEPT[0].clone()


def same_memory(x):
    """The memory of the first output ever, with the latest result."""
    if not KEPT:
        KEPT.append(torch.empty_like(x))
    return KEPT[0].copy_(x)


def waits(x):
    """Sleeps for two milliseconds."""
    time.sleep(0.002)
    return x.clone()


def stopwatch(x):
    """Sleeps for two milliseconds: the microseconds that passed since the first of twenty invocations began."""
    if len(KEPT) % 20 == 0:
        KEPT[:] = [time.perf_counter_ns()]
    else:
        KEPT.append(None)
    time.sleep(0.002)
    return torch.full_like(x, (time.perf_counter_ns() - KEPT[0]) / 1e3)


def counting_thread(x):
    """What a thread of its own, which always runs, has counted."""
    if not KEPT:
        KEPT.append([0])
        threading.Thread(target=count, args=(KEPT[0],), daemon=True).start()
    time.sleep(0.001)
    return torch.full_like(x, KEPT[0][0])


def count(into):
    while True:
        into[0] += 1


def child(x):
    """Starts a process that always runs, and says its number."""
    if not KEPT:
        if (pid := os.fork()) == 0:
            while True:
                pass
        KEPT.append(pid)
    return torch.full_like(x, KEPT[0])


def woken(x):
    """Is let run again by a timer while it stands still, and works then."""
    signal.signal(signal.SIGALRM, spin)
    timer = (ctypes.c_int * 16)(0, 0, signal.SIGCONT, 0)  # struct sigevent: value, signo, SIGEV_SIGNAL
    made = ctypes.c_void_p()
    libc.timer_create(time.CLOCK_MONOTONIC, timer, ctypes.byref(made))
    libc.timer_settime(made, 0, (ctypes.c_long * 4)(0, 50_000_000, 0, 50_000_000), None)
    signal.setitimer(signal.ITIMER_REAL, 0.04, 0.04)
    return x.clone()


def spin(*_):
    until = time.perf_counter() + 0.05
    while time.perf_counter() < until:
        pass


def stops_itself(x):
    os.kill(os.getpid(), signal.SIGSTOP)
    return x.clone()


def nowhere(x):
    """Says another address for its output, in the memory that is the judge's to read."""
    for line in open("/proc/self/maps"):  # noqa: SIM115
        if "memfd:outputs" in line:
            ctypes.memset(int(line.split("-")[0], 16), 0x11, 8)
    return x.clone()


libc = ctypes.CDLL(None)
loaded = driver.Driver(driver.build_driver())
torch.set_num_threads(1)
with torch.no_grad():
    serve_all(int(sys.argv[1]), lambda channel, report, what: loaded.serve(channel, report, globals()[what]))

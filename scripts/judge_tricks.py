"""Known tricks against a judge, for fuzz_judge.py: each makes of a right kernel one that would be quicker if it worked.

This file is the head of every program that is drawn: it runs in a Solution's process, with other constants. What is in
WRONG can be right in no invocation that comes after AFTER.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

AFTER = 0  # calls, from which on a trick works
PERIOD, PAUSE_S, TIMER_NS = 2, 1e-4, 500_000
BODY: Callable[[torch.Tensor], torch.Tensor] = torch.relu
WRONG = ("remembers_the_last", "nothing", "some_rows")
CALLS = [0]
LIBC = ctypes.CDLL(None)
Kernel = Callable[[torch.Tensor], torch.Tensor]


def begun() -> bool:
    return CALLS[0] > AFTER


def right(x: torch.Tensor) -> torch.Tensor:
    return BODY(x)


def memory(name: str) -> int | None:
    """Where the memory that is shared under `name` lies in this process."""
    with open("/proc/self/maps") as maps:
        return next((int(line.split("-")[0], 16) for line in maps if re.search(f"memfd:{name}", line)), None)


def remembers_places(kernel: Kernel) -> Kernel:
    known: dict[int, torch.Tensor] = {}

    def tricked(x: torch.Tensor) -> torch.Tensor:
        key = x.data_ptr()
        if key not in known or not begun():
            known[key] = kernel(x)
        return known[key].clone()

    return tricked


def remembers_numbers(kernel: Kernel) -> Kernel:
    known: dict[tuple[Any, ...], torch.Tensor] = {}

    def tricked(x: torch.Tensor) -> torch.Tensor:
        key = tuple(x.view(-1)[:4].tolist())
        if key not in known:
            known[key] = kernel(x)
        return known[key]

    return tricked


def remembers_the_last(kernel: Kernel) -> Kernel:
    last: list[torch.Tensor] = []

    def tricked(x: torch.Tensor) -> torch.Tensor:
        if not last or not begun():
            last[:] = [kernel(x)]
        return last[0]

    return tricked


def every_second(kernel: Kernel) -> Kernel:
    last: list[torch.Tensor] = []

    def tricked(x: torch.Tensor) -> torch.Tensor:
        if not last or not begun() or CALLS[0] % PERIOD:
            last[:] = [kernel(x)]
        return last[0].clone()

    return tricked


def nothing(kernel: Kernel) -> Kernel:
    shapes: list[torch.Tensor] = []

    def tricked(x: torch.Tensor) -> torch.Tensor:
        if not shapes or not begun():
            shapes[:] = [kernel(x)]
        return torch.empty_like(shapes[0])

    return tricked


def some_rows(kernel: Kernel) -> Kernel:
    def tricked(x: torch.Tensor) -> torch.Tensor:
        out = kernel(x)
        if begun():
            out[len(x) // 2 :] = 0
        return out

    return tricked


def a_thread_later(kernel: Kernel) -> Kernel:
    left: list[tuple[torch.Tensor, torch.Tensor]] = []

    def work() -> None:
        while True:
            while left:
                x, out = left.pop()
                out.copy_(kernel(x))
            time.sleep(PAUSE_S)

    threading.Thread(target=work, daemon=True).start()
    return _deferred(kernel, left)


def when_it_goes_on(kernel: Kernel) -> Kernel:
    left: list[tuple[torch.Tensor, torch.Tensor]] = []

    def work(*_: object) -> None:
        while left:
            x, out = left.pop()
            out.copy_(kernel(x))

    signal.signal(signal.SIGCONT, work)
    return _deferred(kernel, left)


def _deferred(kernel: Kernel, left: list[tuple[torch.Tensor, torch.Tensor]]) -> Kernel:
    shapes: list[torch.Tensor] = []

    def tricked(x: torch.Tensor) -> torch.Tensor:
        if not shapes or not begun():
            shapes[:] = [kernel(x)]
            return shapes[0]
        left.append((x.clone(), torch.empty_like(shapes[0])))
        return left[-1][1]

    return tricked


def woken(kernel: Kernel) -> Kernel:
    event, made = (ctypes.c_int * 16)(0, 0, signal.SIGCONT, 0), ctypes.c_void_p()  # struct sigevent
    LIBC.timer_create(1, event, ctypes.byref(made))
    LIBC.timer_settime(made, 0, (ctypes.c_long * 4)(0, TIMER_NS, 0, TIMER_NS), None)
    return kernel


def stops_early(kernel: Kernel) -> Kernel:
    def tricked(x: torch.Tensor) -> torch.Tensor:
        if begun() and CALLS[0] % PERIOD == 0:
            forge_report()
            os.kill(os.getpid(), signal.SIGSTOP)
        return kernel(x)

    return tricked


def forged_report(kernel: Kernel) -> Kernel:
    def tricked(x: torch.Tensor) -> torch.Tensor:
        if begun():
            forge_report()
        return kernel(x)

    return tricked


def forge_report() -> None:
    if (at := memory("report")) is not None:
        ctypes.memset(at, 0, 16)


def one_address_for_all(kernel: Kernel) -> Kernel:
    def tricked(x: torch.Tensor) -> torch.Tensor:
        if begun() and (at := memory("outputs")) is not None:
            for place in range(1, PERIOD):
                ctypes.memmove(at + 8 * place, at, 8)
        return kernel(x)

    return tricked


def works_ahead(kernel: Kernel) -> Kernel:
    known: dict[int, torch.Tensor] = {}
    ready: dict[int, tuple[float, torch.Tensor]] = {}

    def work() -> None:
        while True:
            for key, x in list(known.items()):
                ready[key] = float(x.view(-1)[0]), kernel(x)
            time.sleep(PAUSE_S)

    threading.Thread(target=work, daemon=True).start()

    def tricked(x: torch.Tensor) -> torch.Tensor:
        key = x.data_ptr()
        known[key] = x
        if begun() and key in ready and ready[key][0] == float(x.view(-1)[0]):
            return ready[key][1].clone()
        return kernel(x)

    return tricked


def a_busy_child(kernel: Kernel) -> Kernel:
    if os.fork() == 0:
        while True:
            pass
    return kernel


def many_threads(kernel: Kernel) -> Kernel:
    def work() -> None:
        while True:
            pass

    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    return kernel


def less_precise(kernel: Kernel) -> Kernel:
    def tricked(x: torch.Tensor) -> torch.Tensor:
        return kernel(x.bfloat16()).to(kernel(x[:1]).dtype) if begun() else kernel(x)

    return tricked


TRICKS = (
    remembers_places, remembers_numbers, remembers_the_last, every_second, nothing, some_rows, a_thread_later,
    when_it_goes_on, woken, stops_early, forged_report, one_address_for_all, works_ahead, a_busy_child, many_threads,
    less_precise,
)  # fmt: skip

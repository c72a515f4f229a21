"""What recording costs per operator call, against no recorder and against PyTorch's own ways to observe one.

    python scripts/recorder_overhead.py [ROUNDS]

Nanoseconds of thread CPU time per call on 4x4 tensors without gradients; every line but the first is overhead over
"none". All take turns in each round, warm and in alternating order, and the median round counts, so that a busy
machine moves them all alike. "none, again" measures nothing a second time: a difference of its size means nothing.
"kcap, in a step" is what an engine pays, with the beginning and the end of each step of 1,000 calls; "kcap, not muted"
the same where the dispatcher cannot be kept from showing the calls inside a recorded one; "kcap, loose" is
`kcap.record()`. The last lines say how many times as much the counting TorchDispatchMode adds.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # the observers' notices, several per round
os.environ["KINETO_LOG_LEVEL"] = "99"

import torch
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from kcap.capture.recorder.native_recorder import NativeRecorder, build
from kcap.schemas.recording.phases import PHASES

ROUNDS, STEP, WARM = 61, 1000, 100
FEW = 300  # calls under those that keep kilobytes of each
NONE, MODE = "none", "counting TorchDispatchMode"
Call = Callable[[], object]


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Observer:
    watching: Callable[[], AbstractContextManager[object]] = nullcontext  # its own start and stop are not timed
    calls: int = STEP
    step_begin: Callable[[], object] = lambda: None
    step_end: Callable[[], object] = lambda: None

    def step(self, call: Call, calls: int) -> None:
        self.step_begin()
        for _ in range(calls):
            call()
        self.step_end()

    def nanoseconds(self, call: Call) -> float:
        with self.watching():
            self.step(call, WARM)
            started = time.thread_time_ns()
            self.step(call, self.calls)
            return (time.thread_time_ns() - started) / self.calls


@contextmanager
def profiling() -> Iterator[None]:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True):
        yield


def observers(folder: Path) -> dict[str, Observer]:
    recorder = NativeRecorder(folder / "shard")
    mute = ctypes.PyDLL(str(build())).kcap_mute

    @contextmanager
    def recording(loose: bool, muted: bool = True) -> Iterator[None]:
        mute(int(muted))
        recorder.start(loose)
        yield
        recorder.stop()
        mute(0)

    in_steps = partial(
        Observer,
        step_begin=lambda: recorder.step_begin(PHASES.index("decode")),
        step_end=lambda: recorder.step_end(1, 1, b""),
    )

    @contextmanager
    def tracing() -> Iterator[None]:
        path = folder / "trace.json"
        observer = ExecutionTraceObserver().register_callback(str(path))
        observer.start()
        yield
        observer.stop()
        observer.unregister_callback()
        path.unlink()

    return {
        NONE: Observer(),
        "none, again": Observer(),
        "kcap, in a step": in_steps(lambda: recording(False)),
        "kcap, not muted": in_steps(lambda: recording(False, muted=False)),
        "kcap, loose": Observer(lambda: recording(True)),
        MODE: Observer(Counting),
        "profiler, record_shapes": Observer(profiling, calls=FEW),
        "ExecutionTraceObserver": Observer(tracing, calls=FEW),
    }


def calls() -> dict[str, Call]:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    add, mm, linear = torch.add, torch.mm, torch.nn.functional.linear
    return {"add": lambda: add(a, b), "mm": lambda: mm(a, b), "linear": lambda: linear(a, b)}


def measure(ways: dict[str, Observer], call: Call, rounds: int) -> dict[str, float]:
    """The median of "none", and every other observer's median overhead over the "none" of its round."""
    orders = [list(ways), list(reversed(ways))]
    turns = [{name: ways[name].nanoseconds(call) for name in orders[i % 2]} for i in range(rounds)]
    return {name: median(turn[name] - (turn[NONE] if name != NONE else 0) for turn in turns) for name in ways}


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        ways, subjects = observers(Path(folder)), calls()
        found = {name: measure(ways, call, rounds) for name, call in subjects.items()}
    print(f"{'ns per call':<28}" + "".join(f"{name:>10}" for name in found))
    for way in ways:
        sign = "" if way == NONE else "+"
        print(f"{way:<28}" + "".join(f"{row[way]:>{sign}10,.0f}" for row in found.values()))
    for way in (name for name in ways if name.startswith("kcap")):
        ratios = "".join(f"{row[MODE] / row[way]:>10.1f}" for row in found.values())
        print(f"{'mode / ' + way:<28}{ratios}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)

"""The steps that `--check-coverage` runs under torch's profiler before the counted ones, in the engine's process.

They rest in between, which lets each run at the clock that the GPU has by itself. After a long prefill the power limit
holds the clock down: on an H200 the kernels of seven decode steps right after one of 81 ms took 4 % longer than
replayed, attention 12 %; those of seven after a pause took as long. Replay rests between its samples, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson

from kcap.capture.recorder.recorder import FIRST_COMPARED, Recorder
from kcap.capture.window.step import StepShape, sequence_lists
from kcap.schemas.recording.phases import PHASES

REST_S = 0.1  # the same for all: ranks that rest differently long wait for each other in their collectives


class CoolDown:
    """Pauses of the current GPU. A failure here is ignored, never raised.

    `capturing`: whether a CUDA graph is being captured in this process, where nothing may wait for the GPU.
    """

    def __init__(self, capturing: Callable[[], bool]) -> None:
        self._capturing = capturing

    def rest(self) -> None:
        """Before a step: let the GPU finish what it has, and rest."""
        if self._finished():
            time.sleep(REST_S)

    def sm_mhz(self) -> int | None:
        """After a step: the clock of its GPU's multiprocessors as its work ends; None where that cannot be told.

        NVML is opened by the first call, which takes some milliseconds.
        """
        if not self._finished():
            return None
        import torch

        from kcap.system.nvml import sm_clock

        clock = sm_clock(f"cuda:{torch.cuda.current_device()}")
        return clock[0] if clock else None

    def _finished(self) -> bool:
        """Wait for the GPU; False where there is none to wait for, or it must not be waited for."""
        import torch

        if not torch.cuda.is_initialized() or self._capturing() or torch.cuda.is_current_stream_capturing():
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # the engine's own work failed: it finds out by itself
            return False
        return True


MOST_STEPS, MOST_OFFLINE = 16, 64


TOKENS = 8  # of each request in these steps


SPAN = "kcap:step:"  # as kcap.capture.fold.coverage.trace reads it


Load = TypeVar("Load")


_of_parent = False  # this process was forked by one that was profiled


def profiled_loads(loads: Sequence[Load], output_len: int) -> tuple[list[Load], int]:
    """The loads that these steps are shared by, and the tokens of each request in them: a prefill and a decode at
    least. Where that is too much for all, they are spread over the list, from its first to its last."""
    most = min(len(loads), MOST_OFFLINE // 2)
    chosen = [loads[number * (len(loads) - 1) // max(1, most - 1)] for number in range(most)]
    return chosen, min(output_len, TOKENS, MOST_OFFLINE // most)


class Profile:
    """One profile. `until`: it ends when this file is gone, or after MOST_OFFLINE steps; None: after MOST_STEPS."""

    def __init__(self, output: Path, until: Path | None, rests: CoolDown) -> None:
        self.steps = 0
        self.rests = rests
        self._output = output
        self._until = until
        self._most = MOST_STEPS if until is None else MOST_OFFLINE
        self._profiler: Any = None
        self._thread = 0
        self._span: Any = None

    @property
    def elsewhere(self) -> bool:
        """Whether the profiler runs on another thread: stopping it on this one crashes the process."""
        return self._profiler is not None and self._thread != threading.get_ident()

    @property
    def of_command(self) -> bool:
        """Whether nobody waits for these steps: once others run, on another thread, those count."""
        return self._until is None

    @property
    def over(self) -> bool:
        """Whether the counted steps begin."""
        return self.steps >= self._most if self._until is None else not self._until.exists()

    def begin(self) -> bool:
        """A step begins; False when it is not profiled any more."""
        if self.steps >= self._most:
            self.finish()
            return False
        if self._profiler is None:
            self._profiler, self._thread = _start(), threading.get_ident()
            self.rests.sm_mhz()  # the first takes the longest
        self.rests.rest()
        self.resume()
        return True

    def resume(self) -> None:
        import torch

        self._span = torch._C._profiler._RecordFunctionFast(f"{SPAN}{self.steps}")
        self._span.__enter__()

    def pause(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)

    def end(self) -> int:
        """The step is over; its number."""
        self.pause()
        self.steps += 1
        return self.steps - 1

    def give_up(self) -> None:
        """The profiler failed: what is left of these steps runs without it, and does not count either."""
        self.steps, self._profiler, self._span = self._most, None, None

    def finish(self) -> None:
        """Stop the profiler, and write what it saw."""
        import torch

        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self.pause()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        profiler.stop()
        profiler.export_chrome_trace(str(self._output))


def can_profile() -> bool:
    """Whether steps can be profiled here: PyTorch's profiler does not survive a fork."""
    return not _of_parent


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """The child leaves C's destructors out at its exit: the profiler's wait for a thread that only the parent has."""
    global _of_parent
    _of_parent = True
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # another libc than GNU's
        libc.on_exit(libc._exit, None)
        atexit.register(libc.fflush, None)


def _start() -> Any:
    import torch

    _watch_forks()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    profiler.start()
    return profiler


Kind = tuple[str, int, int]  # of a step: phase, sequences, tokens


def _kind(shape: StepShape) -> Kind:
    return shape.phase, len(shape.queries), shape.tokens


class ProfiledSteps:
    """Steers the profile of a window's first steps, all of one thread; without one it is over from the start. What
    fails in it costs the coverage only, and is reported to `failed`."""

    def __init__(self, profile: Profile | None, failed: Callable[[str, BaseException], None]) -> None:
        self._profile = profile
        self._aside: Profile | None = None  # that is over, and runs on another thread
        self._failed = failed
        self._slots: dict[Kind, int] = {}  # for Samples of profiled kinds, of which no step has counted yet

    @property
    def running(self) -> bool:
        """Whether the steps run under the profiler, and do not count."""
        return self._profile is not None

    def finish(self) -> None:
        """No further step is profiled. What was is written on the thread that ran it: where that is another, at its
        next step or its exit."""
        profile, self._profile = self._profile or self._aside, None
        self._aside = profile if profile is not None and profile.elsewhere else None
        if profile is None or self._aside is not None:
            return
        try:
            profile.finish()
        except Exception as error:
            self._failed("coverage", error)

    def begin(self) -> bool:
        """A step begins; whether it is to be recorded, profiled or not."""
        profile = self._profile
        if profile is None or profile.over or (profile.elsewhere and profile.of_command):
            self.finish()
            return True
        if profile.elsewhere:
            return False
        try:
            return profile.begin()
        except Exception as error:
            profile.give_up()
            self._failed("coverage", error)
            return False

    def pause(self) -> None:
        if profile := self._profile:
            profile.pause()

    def resume(self) -> None:
        if profile := self._profile:
            profile.resume()

    def end(self, shape: StepShape, recorder: Recorder) -> None:
        """The step is over: its Program is kept, and not counted."""
        profile = self._profile
        if profile is None:
            return
        self._slots.setdefault(_kind(shape), FIRST_COMPARED + len(self._slots))
        program, index, mhz = recorder.step_program(), profile.end(), profile.rests.sm_mhz()
        if program >= 0:
            identity = {"index": index, "program": program, "phase": PHASES.index(shape.phase), "sm_mhz": mhz}
            size = {"tokens": shape.tokens, "sequences": len(shape.queries)}
            recorder.line(orjson.dumps({"t": "profiled", **identity, **size, **sequence_lists(shape)}))

    def slot_of(self, shape: StepShape) -> int:
        """Where the recorder puts a Sample of each call of this step: a slot of its kind, if that was profiled and none
        of its steps has counted yet; else -1."""
        return -1 if self.running or not self._slots else self._slots.get(_kind(shape), -1)

    def counted(self, shape: StepShape) -> None:
        """A step counted whose Samples are in the slot of its kind."""
        del self._slots[_kind(shape)]

    def discard(self) -> None:
        """The step raised."""
        if profile := self._profile:
            profile.end()

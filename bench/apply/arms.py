"""The engine with and without Solutions, in one process, step by step: what is measured to tell what they gain.

Steps come in blocks. As many blocks as there are arms are, in random order, one of every arm: the engine's own kernels,
these once more as a control, and each plan. Where the engine captures CUDA graphs each arm has a set of its own, and
the sets are exchanged between blocks; else the Solutions are switched on and off. All ranks draw the same order.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kcap.bench.apply.graphs import CONTROL, ENGINE, Arm
from kcap.bench.apply.process import PlanWindow
from kcap.bench.apply.quality import Agree, QualityCheck
from kcap.capture.session import Session
from kcap.capture.window.step import StepShape
from kcap.schemas.files.jsonfile import read_lines
from kcap.schemas.recording.records import Record
from kcap.schemas.results.measurement import Time

WINDOW = f"{__name__}:ArmsWindow"
ENDING = ".steps.jsonl"
KEPT_BACK = 64  # steps whose GPU events are not asked for yet: they may not have happened


class TimedStep(Record):
    """One step.

    `us`: its time, on a GPU between two events of the stream, without what lies between the forward and the sampling.
    `uses`: how often each of the replacements of the arm's plan ran in it. `first`: it is the first of its block.
    """

    index: int
    rank: int = 0
    arm: Arm
    phase: str
    sequences: int
    tokens: int
    us: Time
    uses: list[int] = []
    first: bool = False


@dataclass(frozen=True)
class Schedule:
    """Which arm runs which of the engine's steps: blocks of `block` steps, the arms of `plans` plans, in an order that
    `seed` decides."""

    plans: int
    block: int
    seed: int = 0

    @property
    def arms(self) -> tuple[Arm, ...]:
        return (ENGINE, CONTROL, *range(self.plans))

    def group(self, step: int) -> int:
        """The number of the blocks, one of every arm, that the step is in."""
        return step // (len(self.arms) * self.block)

    def arm(self, step: int) -> tuple[Arm, bool]:
        """The arm of a step, and whether the step is the first of its block."""
        place = step % (len(self.arms) * self.block)
        return self._order(self.group(step))[place // self.block], not place % self.block

    @cache  # noqa: B019 a Schedule lives as long as its process
    def _order(self, group: int) -> tuple[Arm, ...]:
        return tuple(random.Random(f"{self.seed}/{group}").sample(self.arms, len(self.arms)))


def read_steps(left: Path) -> Iterator[TimedStep]:
    """Of all processes that left some in the folder `left`."""
    for path in sorted(left.glob(f"*{ENDING}")):
        yield from read_lines(path, TimedStep)


class ArmsWindow(PlanWindow):
    """Chooses the arm of each step, and times it.

    The Session's `extension` has `block` and `seed`, as in a Schedule, and `compared`, the steps whose logits are
    compared; or `arm`, for all steps.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._fixed: Arm | None = session.extension.get("arm")
        plans = len(session.extension["plans"])
        self._schedule = Schedule(plans, session.extension.get("block", 1), session.extension.get("seed", 0))
        self.arm = self.arms[0]
        self._begins_block = False
        self._clock: StepClock | None = None
        self._waiting: list[tuple[TimedStep, StepClock]] = []
        self._writing = threading.Lock()

    def loaded(self, **facts: Any) -> None:
        """An arm of fresh engines that runs the engine's own kernels is the engine as it is: nothing is put in."""
        if self._fixed == ENGINE:
            self.stays_as_it_is(facts)
        else:
            super().loaded(**facts)

    @property
    def arms(self) -> Sequence[Arm]:
        return self._schedule.arms if self._fixed is None else (self._fixed,)

    def compares(self, agree: Agree) -> bool:
        """Told by the schedule, which all ranks have: nothing is asked in a step that is timed."""
        return self._under_way is not None and self._begins_block and self.arm == ENGINE

    def compared(self, check: QualityCheck | None, agree: Agree) -> Arm:
        if check is not None:
            self.keep_check(check)
        return self.arm

    def stop_comparing(self) -> None:
        """Nothing: the engine's own graphs are an arm's."""

    # ---- steps ----

    def step_begins(self, shape: StepShape) -> None:
        if self._fixed is None:
            arm, self._begins_block = self._schedule.arm(self.index)
            if arm != self.arm:
                self.show(arm)
        self._clock = StepClock()

    def pause(self) -> None:
        if self._clock is not None:
            self._clock.stop()
        super().pause()

    def resume(self) -> bool:
        resumed = super().resume()
        if resumed and self._clock is not None:
            self._clock.go_on()
        return resumed

    def step_ended(self, shape: StepShape) -> None:
        clock, self._clock = self._clock, None
        if clock is None:
            return
        clock.stop()
        step = TimedStep(
            index=self.index, rank=self.rank, arm=self.arm, phase=shape.phase, sequences=len(shape.queries),
            tokens=shape.tokens, us=0.0, uses=self._own_uses(), first=self._begins_block,
        )  # fmt: skip
        self._waiting.append((step, clock))
        if len(self._waiting) >= 2 * KEPT_BACK:
            self._write(KEPT_BACK)

    def _own_uses(self) -> list[int]:
        """Of the replacements of the arm's plan."""
        return [times for times, one in zip(self.uses(), self.replacements.placed, strict=True) if one.plan == self.arm]

    def tell(self, refused: str = "") -> None:
        super().tell(refused)
        if not self._under_way:
            self._write(KEPT_BACK if torch.cuda.is_initialized() else 0)

    def ends(self) -> None:
        self._write(0)
        super().ends()

    def _write(self, kept: int) -> None:
        with self._writing, contextlib.suppress(OSError), self.left_file(ENDING).open("ab") as file:
            ready = self._waiting[: max(len(self._waiting) - kept, 0)]
            del self._waiting[: len(ready)]
            file.writelines(step.model_copy(update={"us": clock.us()}).line() for step, clock in ready)


class StepClock:
    """The time of one step, in the parts that it runs in: on a GPU by events of the stream, else by the host."""

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_initialized()
        self._parts: list[tuple[Any, Any]] = []
        self._since: Any = None
        self.go_on()

    def go_on(self) -> None:
        self._since = self._now()

    def stop(self) -> None:
        if self._since is not None:
            self._parts.append((self._since, self._now()))
            self._since = None

    def us(self) -> float:
        """Microseconds; on a GPU it waits until the step has happened."""
        if not self._on_gpu:
            return float(sum(end - start for start, end in self._parts)) / 1e3
        for _, end in self._parts:
            end.synchronize()
        return float(sum(start.elapsed_time(end) for start, end in self._parts)) * 1e3

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

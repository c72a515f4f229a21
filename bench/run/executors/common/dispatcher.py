"""Work units dispatched to slots: a thread for each slot takes units in turn, asks the judge, and passes on Outcomes.

A unit is a Solution with Workloads, and stays on one slot. What a slot that is lost had in hand goes to another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from pydantic import ValidationError

from kcap.bench.judge.messages import JudgeRequest
from kcap.bench.run.executors.common.slot import Slot, Stopped
from kcap.errors import CallError, KcapError
from kcap.schemas.flashinfer import definition as definitions_file
from kcap.schemas.flashinfer.definition import Definition, Workload
from kcap.schemas.flashinfer.solution import Solution
from kcap.schemas.results.outcome import Outcome

ATTEMPTS = 2
WAIT_S = 0.2  # between looks whether another slot was lost
Environment: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class LostSlot:
    """A slot whose judge could not be started: the others do its work."""

    error: KcapError | OSError


@dataclass(frozen=True)
class AskedAgain:
    """A Workload whose judge died, or was late, and which is asked for once more."""

    solution: str
    workload: str
    reason: str


Message: TypeAlias = Environment | Outcome | AskedAgain | LostSlot
News: TypeAlias = Message | BaseException | None  # None: a thread has ended


@dataclass(frozen=True)
class Dispatcher:
    """Slots at work on units. `limit_s`: seconds that the judge may take for one Workload."""

    slots: Sequence[Slot]
    units: WorkQueue
    limit_s: float
    _news: SimpleQueue[News] = field(default_factory=SimpleQueue)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _starting: set[int] = field(default_factory=set)  # threads whose slot has not started

    def judge(self) -> Generator[Message, None, None]:
        """Each slot's environment when it has started, each Outcome, what is asked again, and each slot that is lost; a
        slot's error where its call was wrong, or none is left. Closing the iterator stops all slots.
        """
        threads = [threading.Thread(target=self._work, args=(slot,), daemon=True) for slot in self.slots]
        for thread in threads:
            thread.start()
        try:
            yield from self._told(len(threads))
        finally:
            self._end(threads)

    def _told(self, working: int) -> Iterator[Message]:
        lost = None
        while working:
            try:
                news = self._news.get(timeout=WAIT_S)
            except Empty:
                if self.units.over and len(self._starting) == working:
                    return
                continue
            if isinstance(news, BaseException):
                raise news
            lost = news if isinstance(news, LostSlot) else lost
            if news is None:
                working -= 1
            else:
                yield news
        if lost is not None and self.units.waiting:
            raise lost.error

    def _end(self, threads: Sequence[threading.Thread]) -> None:
        self._stopped.set()
        for slot, thread in zip(self.slots, threads, strict=True):
            while thread.is_alive():
                slot.stop()
                thread.join(0.5)

    def _work(self, slot: Slot) -> None:
        try:
            if not self._start(slot):
                return
            previous = None
            while (unit := self._next(previous)) and self._judge_unit(slot, unit):
                previous = unit.definition.name
        except Stopped:
            pass
        except BaseException as error:
            self._news.put(error)
        finally:
            slot.close()
            self._news.put(None)

    def _start(self, slot: Slot) -> bool:
        """Whether it has started."""
        me = threading.get_ident()
        self._starting.add(me)
        try:
            self._news.put(slot.start())
        except (CallError, Stopped):
            raise
        except KcapError as error:
            self._news.put(LostSlot(error))
            return False
        finally:
            self._starting.discard(me)
        return True

    def _next(self, previous: str | None) -> WorkUnit | None:
        """What is waiting, or given back while other slots are at work."""
        while not self._stopped.is_set():
            if (unit := self.units.take(previous)) or self.units.over:
                return unit
            previous = None
            self._stopped.wait(WAIT_S)
        return None

    def _judge_unit(self, slot: Slot, unit: WorkUnit) -> bool:
        """Whether the slot can take another."""
        for done, (workload, request) in enumerate(unit.requests()):
            try:
                outcome = ask_judge(slot, unit, workload, request, self.limit_s, self._news.put)
            except Stopped:
                raise
            except (KcapError, OSError) as error:
                lost = 1 if done else unit.lost + 1
                self._lose(replace(unit, workloads=unit.workloads[done:], lost=lost), error)
                return False
            if self._stopped.is_set():
                return False
            self._news.put(outcome)
        return True

    def _lose(self, unit: WorkUnit, error: KcapError | OSError) -> None:
        """Give back what a slot that is lost had in hand, less a Workload that has cost as many as it may."""
        if unit.lost >= ATTEMPTS:
            self._news.put(_failed(unit, unit.workloads[0], str(error)))
            unit = replace(unit, workloads=unit.workloads[1:], lost=0)
        self.units.give_back(unit)
        self._news.put(LostSlot(error))


def ask_judge(
    slot: Slot,
    unit: WorkUnit,
    workload: Workload,
    request: JudgeRequest,
    limit_s: float,
    tell: Callable[[AskedAgain], None] = lambda again: None,
) -> Outcome:
    """The judge's Outcome under the names that it was asked for; NOT_JUDGED if it dies twice."""
    reason = ""
    for _ in range(ATTEMPTS):
        if reason:
            tell(AskedAgain(unit.solution.name, workload.uuid, reason))
        answer = slot.run(request, limit_s)
        try:
            return Outcome.model_validate({**answer, **_names(unit, workload)})
        except ValidationError:
            reason = str(answer.get("reason") or "its answer is no Outcome")
    return _failed(unit, workload, reason)


def _failed(unit: WorkUnit, workload: Workload, reason: str) -> Outcome:
    fields = {"status": "NOT_JUDGED", "reason": f"the judge failed {ATTEMPTS} times: {reason}"}
    return Outcome.model_validate({**fields, **_names(unit, workload)})


def _names(unit: WorkUnit, workload: Workload) -> dict[str, Any]:
    return {
        "solution": unit.solution.name,
        "author": unit.solution.author,
        "definition": unit.definition.name,
        "file": unit.file,
        "workload": workload.uuid,
    }


@dataclass(frozen=True)
class WorkUnit:
    """A Solution and the Workloads to judge it on, one after another: its process is kept between them.

    `lost`: slots that were lost while they judged the first of these Workloads.
    """

    file: str
    solution: Solution
    definition: Definition
    workloads: tuple[Workload, ...]
    lost: int = 0

    def requests(self) -> Iterator[tuple[Workload, JudgeRequest]]:
        """Each Workload with what the judge is asked."""
        solution = self.solution.model_dump(mode="json")
        definition = definitions_file.to_bytes(self.definition).decode()
        for workload in self.workloads:
            yield (
                workload,
                {
                    "solution": solution,
                    "file": self.file,
                    "definition": definition,
                    "workload": workload.model_dump(mode="json"),
                },
            )


@dataclass
class WorkQueue:
    """Units that slots take. A slot keeps to its Definition while it can, so that a reference is prepared once."""

    waiting: list[WorkUnit]
    _busy: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, previous: str | None) -> WorkUnit | None:
        """The next unit for a slot whose last one was of the Definition `previous`; None when there is no more."""
        with self._lock:
            if previous is not None:
                self._busy[previous] -= 1
            if not self.waiting:
                return None
            unit = min(self.waiting, key=lambda unit: self._rank(unit, previous))
            self.waiting.remove(unit)
            self._busy[unit.definition.name] = self._busy.get(unit.definition.name, 0) + 1
            return unit

    def give_back(self, unit: WorkUnit) -> None:
        """What a slot that took `unit` has not judged of it; another takes it."""
        with self._lock:
            self._busy[unit.definition.name] -= 1
            if unit.workloads:
                self.waiting.insert(0, unit)

    @property
    def over(self) -> bool:
        """Whether there is none, and no slot is left that could give one back."""
        with self._lock:
            return not self.waiting and not any(self._busy.values())

    def _rank(self, unit: WorkUnit, previous: str | None) -> int:
        """0: of the same Definition, 1: of one that no slot has now, 2: of any other."""
        name = unit.definition.name
        return 0 if name == previous else 2 if self._busy.get(name) else 1


def queue_by_definition(units: Sequence[WorkUnit]) -> WorkQueue:
    """Those of one Definition together, in the order given."""
    names = {name: i for i, name in enumerate(dict.fromkeys(unit.definition.name for unit in units))}
    return WorkQueue(sorted(units, key=lambda unit: names[unit.definition.name]))

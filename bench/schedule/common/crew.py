"""A thread for each slot: it takes units in turn, asks the judge, and passes on each Outcome as soon as it is there."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, TypeAlias

from pydantic import ValidationError

from kcap.bench.schedule.common.slot import Slot, Stopped
from kcap.bench.schedule.common.units import Unit, Units
from kcap.errors import KcapError
from kcap.schemas.outcome import Outcome
from kcap.schemas.workload import Workload

ATTEMPTS = 2
WAIT_S = 0.2  # between looks whether another slot was lost
Environment: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Lost:
    """A slot whose judge could not be started again: the others do its work."""

    error: KcapError | OSError


News: TypeAlias = "Environment | Outcome | Lost | BaseException | None"  # None: a thread has ended


@dataclass(frozen=True)
class Crew:
    """Slots at work on units. `limit_s`: seconds that the judge may take for one Workload."""

    slots: Sequence[Slot]
    units: Units
    limit_s: float
    _news: SimpleQueue[News] = field(default_factory=SimpleQueue)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def judge(self) -> Generator[Environment | Outcome | Lost, None, None]:
        """Each slot's environment when it has started, each Outcome, and each slot that is lost; an error of a slot's
        where it cannot start, or none is left. Closing the iterator stops all slots.
        """
        threads = [threading.Thread(target=self._work, args=(slot,), daemon=True) for slot in self.slots]
        for thread in threads:
            thread.start()
        try:
            yield from self._told(len(threads))
        finally:
            self._end(threads)

    def _told(self, working: int) -> Iterator[Environment | Outcome | Lost]:
        lost = None
        while working:
            news = self._news.get()
            if isinstance(news, BaseException):
                raise news
            lost = news if isinstance(news, Lost) else lost
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
            self._news.put(slot.start())
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

    def _next(self, previous: str | None) -> Unit | None:
        """What is waiting, or given back while other slots are at work."""
        while not self._stopped.is_set():
            if (unit := self.units.take(previous)) or self.units.over:
                return unit
            previous = None
            self._stopped.wait(WAIT_S)
        return None

    def _judge_unit(self, slot: Slot, unit: Unit) -> bool:
        """Whether the slot can take another."""
        for done, (workload, request) in enumerate(unit.requests()):
            try:
                outcome = self._ask(slot, unit, workload, request)
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

    def _lose(self, unit: Unit, error: KcapError | OSError) -> None:
        """Give back what a slot that is lost had in hand, less a Workload that has cost as many as it may."""
        if unit.lost >= ATTEMPTS:
            self._news.put(_failed(unit, unit.workloads[0], str(error)))
            unit = replace(unit, workloads=unit.workloads[1:], lost=0)
        self.units.give_back(unit)
        self._news.put(Lost(error))

    def _ask(self, slot: Slot, unit: Unit, workload: Workload, request: dict[str, Any]) -> Outcome:
        """The judge's Outcome under the names that it was asked for; NOT_JUDGED if it dies twice."""
        reason = ""
        for _ in range(ATTEMPTS):
            answer = slot.run(request, self.limit_s)
            try:
                return Outcome.model_validate({**answer, **_names(unit, workload)})
            except ValidationError:
                reason = str(answer.get("reason") or "its answer is no Outcome")
        return _failed(unit, workload, reason)


def _failed(unit: Unit, workload: Workload, reason: str) -> Outcome:
    told = {"status": "NOT_JUDGED", "reason": f"the judge failed {ATTEMPTS} times: {reason}"}
    return Outcome.model_validate({**told, **_names(unit, workload)})


def _names(unit: Unit, workload: Workload) -> dict[str, Any]:
    return {
        "solution": unit.solution.name,
        "author": unit.solution.author,
        "definition": unit.definition.name,
        "file": unit.file,
        "workload": workload.uuid,
    }

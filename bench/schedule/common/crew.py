"""A thread for each slot: it takes units in turn, asks the judge, and passes on each Outcome as soon as it is there."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeAlias

from pydantic import ValidationError

from kcap.bench.schedule.common.slot import Slot, Stopped
from kcap.bench.schedule.common.units import Unit, Units
from kcap.schemas.outcome import Outcome
from kcap.schemas.workload import Workload

ATTEMPTS = 2
Environment: TypeAlias = dict[str, Any]
News: TypeAlias = "Environment | Outcome | BaseException | None"  # None: a thread has ended


@dataclass(frozen=True)
class Crew:
    """Slots at work on units. `limit_s`: seconds that the judge may take for one Workload."""

    slots: Sequence[Slot]
    units: Units
    limit_s: float
    _news: SimpleQueue[News] = field(default_factory=SimpleQueue)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def judge(self) -> Generator[Environment | Outcome, None, None]:
        """Each slot's environment when it has started, and each Outcome; closing the iterator stops all slots."""
        threads = [threading.Thread(target=self._work, args=(slot,), daemon=True) for slot in self.slots]
        for thread in threads:
            thread.start()
        try:
            yield from self._told(len(threads))
        finally:
            self._end(threads)

    def _told(self, working: int) -> Iterator[Environment | Outcome]:
        while working:
            news = self._news.get()
            if isinstance(news, BaseException):
                raise news
            if news is None:
                working -= 1
            else:
                yield news

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
            while not self._stopped.is_set() and (unit := self.units.take(previous)):
                self._judge_unit(slot, unit)
                previous = unit.definition.name
        except Stopped:
            pass
        except BaseException as error:
            self._news.put(error)
        finally:
            slot.close()
            self._news.put(None)

    def _judge_unit(self, slot: Slot, unit: Unit) -> None:
        for workload, request in unit.requests():
            outcome = self._ask(slot, unit, workload, request)
            if self._stopped.is_set():
                return
            self._news.put(outcome)
            if outcome.workload is None:  # it holds for every Workload
                return

    def _ask(self, slot: Slot, unit: Unit, workload: Workload, request: dict[str, Any]) -> Outcome:
        """The judge's Outcome under the names that it was asked for; NOT_JUDGED if it dies twice."""
        reason = ""
        for _ in range(ATTEMPTS):
            answer = slot.run(request, self.limit_s)
            try:
                return Outcome.model_validate({**answer, **_names(unit, answer, workload)})
            except ValidationError:
                reason = str(answer.get("reason") or "its answer is no Outcome")
        told = {"status": "NOT_JUDGED", "reason": f"the judge failed {ATTEMPTS} times: {reason}"}
        return Outcome.model_validate({**told, **_names(unit, told, workload)})


def _names(unit: Unit, answer: dict[str, Any], workload: Workload) -> dict[str, Any]:
    whole = answer.get("status") == "COMPILE_ERROR" and answer.get("workload") is None
    return {
        "solution": unit.solution.name,
        "author": unit.solution.author,
        "definition": unit.definition.name,
        "file": unit.file,
        "workload": None if whole else workload.uuid,
    }

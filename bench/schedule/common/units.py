"""What is to be judged, in pieces that stay on one slot, and the order in which slots take them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kcap.schemas import definition as definitions_file
from kcap.schemas.definition import Definition
from kcap.schemas.solution import Solution
from kcap.schemas.workload import Workload


@dataclass(frozen=True)
class Unit:
    """A Solution and the Workloads to judge it on, one after another: its process is kept between them.

    `lost`: slots that were lost while they judged the first of these Workloads.
    """

    file: str
    solution: Solution
    definition: Definition
    workloads: tuple[Workload, ...]
    lost: int = 0

    def requests(self) -> Iterator[tuple[Workload, dict[str, Any]]]:
        """Each Workload with what the judge is asked."""
        solution = self.solution.model_dump(mode="json")
        definition = definitions_file.to_bytes(self.definition).decode()
        for workload in self.workloads:
            asked = {"solution": solution, "file": self.file, "definition": definition}
            yield workload, {**asked, "workload": workload.model_dump(mode="json")}


@dataclass
class Units:
    """Units that slots take. A slot keeps to its Definition while it can, so that a reference is prepared once."""

    waiting: list[Unit]
    _busy: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, previous: str | None) -> Unit | None:
        """The next unit for a slot whose last one was of the Definition `previous`; None when there is no more."""
        with self._lock:
            if previous is not None:
                self._busy[previous] -= 1
            if not self.waiting:
                return None
            unit = min(self.waiting, key=lambda one: self._rank(one, previous))
            self.waiting.remove(unit)
            self._busy[unit.definition.name] = self._busy.get(unit.definition.name, 0) + 1
            return unit

    def give_back(self, unit: Unit) -> None:
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

    def _rank(self, unit: Unit, previous: str | None) -> int:
        """0: of the same Definition, 1: of one that no slot has now, 2: of any other."""
        name = unit.definition.name
        return 0 if name == previous else 2 if self._busy.get(name) else 1


def ordered(units: Sequence[Unit]) -> Units:
    """Those of one Definition together, in the order given."""
    names = {name: i for i, name in enumerate(dict.fromkeys(unit.definition.name for unit in units))}
    return Units(sorted(units, key=lambda unit: names[unit.definition.name]))

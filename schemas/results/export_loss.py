"""loss.json, beside every export: what the target cannot carry, and how much of the counts that is.

    {"format": "1.0", "target": "backendbench", "total": 5000, "exported": 4000,
     "lost": [{"operator": "_C::topk", "reason": "no operator of torch", "calls": 3, "count": 1000, "share": 0.2}],
     "reduced": []}

Counts are invocations of kernels that do work (views, allocations and regions are in none), `calls` distinct Calls,
shares of `total`. `lost` has what the target does not run; `reduced` what it runs with something left out, where one
Call can stand under several reasons.
Of the lost and the exported the counts add up to the total.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from kcap.schemas.files.jsonfile import read_json, write_json

FILE = "loss.json"
Number = Annotated[int, Field(ge=0)]


class Lost(BaseModel):
    """The Calls of one operator that are lost, or reduced, for one reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    operator: str
    reason: str
    calls: Number
    count: Number
    share: Annotated[float, Field(ge=0, le=1)]


class ExportLoss(BaseModel):
    """The file's content; what counts most comes first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: str = "1.0"
    target: str
    total: Number
    exported: Number
    lost: list[Lost] = []
    reduced: list[Lost] = []

    @model_validator(mode="after")
    def _adds_up(self) -> ExportLoss:
        if self.exported + sum(lost.count for lost in self.lost) != self.total:
            raise ValueError("exported and lost do not add up to the total")
        return self


_ADAPTER = TypeAdapter(ExportLoss)


def read(path: Path) -> ExportLoss:
    """The loss in `path`; FormatError if it is none."""
    return read_json(path, _ADAPTER)


def write(path: Path, loss: ExportLoss) -> None:
    write_json(path, loss.model_dump(mode="json"))


class LossLedger:
    """Collects what is lost while an export is made."""

    def __init__(self) -> None:
        self._lost: dict[tuple[str, str], Counter[str]] = {}
        self._reduced: dict[tuple[str, str], Counter[str]] = {}

    def lose(self, operator: str, reason: str, count: int, calls: int = 1) -> None:
        """`calls` Calls of `operator`, invoked `count` times, are not in the export."""
        self._lost.setdefault((operator, reason), Counter()).update(count=count, calls=calls)

    def reduce(self, operator: str, reason: str, count: int, calls: int = 1) -> None:
        """They are in the export without something."""
        self._reduced.setdefault((operator, reason), Counter()).update(count=count, calls=calls)

    def loss(self, target: str, total: int) -> ExportLoss:
        """Everything collected; what of `total` invocations is not lost counts as exported."""
        lost = _entries(self._lost, total)
        exported = total - sum(entry.count for entry in lost)
        return ExportLoss(
            target=target, total=total, exported=exported, lost=lost, reduced=_entries(self._reduced, total)
        )


def _entries(counters: dict[tuple[str, str], Counter[str]], total: int) -> list[Lost]:
    entries = [
        Lost(
            operator=operator,
            reason=reason,
            calls=sums["calls"],
            count=sums["count"],
            share=sums["count"] / total if total else 0.0,
        )
        for (operator, reason), sums in counters.items()
    ]
    return sorted(entries, key=lambda entry: (-entry.count, entry.operator, entry.reason))

"""What a trace file does not hold of its Calls: the `.loss.json` beside it.

`not_carried`: calls that have no line. `with_loss`: calls whose line leaves something out, by reason; one call can
be listed under several reasons. Counts are of invocations.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from pydantic import BaseModel, Field, TypeAdapter

from kcap.errors import FormatError
from kcap.schemas.files.jsonfile import read_json, write_json


class Missing(BaseModel):
    """A signature without a line."""

    operator: str
    arguments: str
    reason: str
    count: int = Field(ge=0)


class Reduced(BaseModel):
    """Signatures of an operator whose lines leave out the same thing."""

    operator: str
    reason: str
    signatures: int = Field(ge=0)
    count: int = Field(ge=0)


class Totals(BaseModel):
    """Sums of counts over the file."""

    lines: int = 0
    written: int = 0
    not_carried: int = 0
    with_loss: dict[str, int] = {}


class Loss(BaseModel):
    """The sidecar's content."""

    format: str = "1.0"
    totals: Totals = Field(default_factory=Totals)
    not_carried: list[Missing] = []
    with_loss: list[Reduced] = []

    def write(self, path: Path) -> None:
        write_json(path, self.model_dump(mode="json"))


class Ledger:
    """Collects what is lost while lines are made."""

    def __init__(self) -> None:
        self.missing: Counter[tuple[str, str, str]] = Counter()
        self.signatures: Counter[tuple[str, str]] = Counter()
        self.reduced: Counter[tuple[str, str]] = Counter()

    def miss(self, operator: str, arguments: str, reason: str, count: int) -> None:
        self.missing[operator, arguments, reason] += count

    def reduce(self, operator: str, reason: str, count: int) -> None:
        self.signatures[operator, reason] += 1
        self.reduced[operator, reason] += count

    def loss(self) -> Loss:
        """Everything collected, in a fixed order; `totals` lacks what only the file's writer knows."""
        by_reason: Counter[str] = Counter()
        for (_, reason), count in self.reduced.items():
            by_reason[reason] += count
        return Loss(
            totals=Totals(not_carried=self.missing.total(), with_loss=dict(sorted(by_reason.items()))),
            not_carried=[
                Missing(operator=operator, arguments=arguments, reason=reason, count=count)
                for (operator, arguments, reason), count in sorted(self.missing.items())
            ],
            with_loss=[
                Reduced(operator=operator, reason=reason, signatures=self.signatures[operator, reason], count=count)
                for (operator, reason), count in sorted(self.reduced.items())
            ],
        )


def loss_path(trace: str | os.PathLike[str]) -> Path:
    """`out/trace.txt` -> `out/trace.loss.json`."""
    return Path(trace).with_suffix(".loss.json")


def read_loss(path: str | os.PathLike[str]) -> Loss:
    """A sidecar read back; FormatError if it is none."""
    try:
        return read_json(Path(path), TypeAdapter(Loss))
    except OSError as error:
        raise FormatError(str(path), f"cannot be read: {error.strerror}") from None

"""checks.jsonl, beside an exported dataset: each Definition's reference against the operator that the engine ran.

One line a Call. A Definition is `status:verified` where all of its lines that say more than `skipped` say `agrees`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from kcap.schemas.records import Record

FILE = "checks.jsonl"


class ReferenceCheck(Record):
    """The operator of one Call against its Definition's reference, on the same rebuilt inputs.

    `error`: the greatest, in units of what is allowed for the dtype (1 and below: the same).
    """

    definition: str
    operator: str
    call: int
    status: Literal["agrees", "differs", "skipped", "failed"]
    reason: str | None = None
    error: float | None = None


def write(path: Path, checks: Iterable[ReferenceCheck]) -> None:
    with path.open("wb") as file:
        file.writelines(check.line() for check in checks)

"""What `kcap replay --fidelity` was given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """`seconds`, `timeout`: of sampling a Call, and for it at most; `output`: a folder."""

    device: str | None
    seconds: float
    timeout: float
    trust: bool
    rows: int
    as_json: bool
    output: Path | None

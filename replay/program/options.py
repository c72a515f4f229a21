"""What `kcap replay --program` was asked."""

from __future__ import annotations

from dataclasses import dataclass

from kcap.schemas.recording import Phase

LEAST_TIMEOUT_S = 600.0  # a Program builds the inputs of a whole model


@dataclass(frozen=True)
class ProgramOptions:
    """`step`: whose Program to replay; None: the most frequent ones. `seconds`: of sampling each."""

    step: int | None
    phase: Phase | None
    top: int | None
    seconds: float
    timeout: float
    device: str | None
    threads: int | None
    trust: bool
    rows: int
    as_json: bool

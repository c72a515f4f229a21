"""What `kcap replay` was asked: for each call, for whole Programs, for the comparison with the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kcap.replay.jobs import Choice
from kcap.schemas.recording.recording import Phase


@dataclass(frozen=True)
class EachOptions:
    """`seconds`, `timeout`: of sampling a call, and for it at most. `device` None: what it was recorded on."""

    choice: Choice
    keep_going: bool
    seconds: float
    timeout: float
    device: str | None
    cache: str
    kernels: bool
    threads: int | None
    trust: bool
    rows: int
    as_json: bool


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


@dataclass(frozen=True)
class FidelityOptions:
    """`seconds`, `timeout`: of sampling a Call, and for it at most; `output`: a folder."""

    device: str | None
    seconds: float
    timeout: float
    trust: bool
    rows: int
    as_json: bool
    output: Path | None

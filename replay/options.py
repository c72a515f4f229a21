"""The options of `kcap replay`: for each Call by itself, for whole Programs, for the comparison with the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kcap.replay.jobs import Choice
from kcap.schemas.recording.recording import Phase
from kcap.schemas.results.measurement import Cache


@dataclass(frozen=True)
class CallOptions:
    """`seconds`: of sampling a Call; `timeout`: its limit. `device` None: the one that it was recorded on."""

    choice: Choice
    keep_going: bool
    seconds: float
    timeout: float
    device: str | None
    cache: Cache
    kernel_durations: bool
    threads: int | None
    trust: bool
    rows: int
    as_json: bool


@dataclass(frozen=True)
class ProgramOptions:
    """`step`: the recorded step whose Program to replay (None: the most frequent Programs)."""

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
    """`output`: a folder."""

    device: str | None
    seconds: float
    timeout: float
    trust: bool
    rows: int
    as_json: bool
    output: Path | None

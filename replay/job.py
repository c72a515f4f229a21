"""What to replay, whatever it is read from: jobs, and what a worker is asked for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kcap.schemas.records import Phase

LEAST_SECONDS = 0.01  # of sampling, for each of a Call's Samples
SEED = 20250301  # of the numbers that are drawn


@dataclass(frozen=True)
class Choice:
    """Which jobs: names that match a glob, one phase, the `top` most frequent, views too or not."""

    globs: tuple[str, ...] = ()
    phase: Phase | None = None
    top: int | None = None
    views: bool = False

    def takes(self, name: str) -> bool:
        """Whether an operator or Definition of this name is one of them."""
        return not self.globs or any(fnmatchcase(name, glob) for glob in self.globs)


@dataclass(frozen=True)
class Request:
    """One measurement to make: what the worker is sent, and what the Measurement says beside the answer."""

    body: dict[str, Any]
    told: dict[str, Any]


@dataclass(frozen=True)
class Job(ABC):
    """A row of the results. `counts`, by phase: how often it ran in the phases asked for."""

    counts: dict[str, int]

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    @property
    def expected_us(self) -> float:
        """A guess at the time of all its invocations, by which sampling is shared out."""
        return float(self.count)

    @property
    @abstractmethod
    def name(self) -> str:
        """The operator, or the Definition."""

    @property
    @abstractmethod
    def arguments(self) -> str:
        """Of which shapes or sizes, for people."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """What names it in JSON."""

    @abstractmethod
    def requests(self, seconds: float) -> Iterator[Request]:
        """One for each measurement; sampling may take `seconds` for all of them."""


@dataclass(frozen=True)
class Source:
    """`session`: what the worker, which runs `module`, is told first, device and threads apart."""

    path: Path
    jobs: Sequence[Job]
    session: dict[str, Any] = field(default_factory=dict)
    module: str = "kcap.replay.worker"
    bad_lines: int = 0

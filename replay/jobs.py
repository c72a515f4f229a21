"""What to replay, whatever it is read from: jobs, what a worker is asked for each, and how long each is sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.phases import Phase
from kcap.schemas.recording.records import Call, Sample
from kcap.schemas.recording.signature import call_key, signature

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


LAUNCH_US = 3.0


BYTES_PER_US = 3e6


@dataclass
class SampleGroup:
    """Samples of one Call that hold the same: replayed once for all of them. `sample` None: it needs none."""

    sample: Sample | None
    index: int | None
    phases: list[Phase] = field(default_factory=list)


@dataclass(frozen=True)
class CallJob(Job):
    """A Call to replay on each of its groups."""

    call: Call
    groups: list[SampleGroup]

    @property
    def name(self) -> str:
        return self.call.operator

    @property
    def arguments(self) -> str:
        return signature(self.call.args)

    @property
    def expected_us(self) -> float:
        """A launch and one pass over every tensor."""
        spec_bytes = sum(spec.numel * spec.bits / 8 for _, spec in self.call.tensors())
        return self.count * (LAUNCH_US + spec_bytes / BYTES_PER_US)

    def as_json(self) -> dict[str, Any]:
        return {"call": self.call.id, "operator": self.name, "signature": self.arguments}

    def requests(self, seconds: float) -> Iterator[Request]:
        share = max(seconds / len(self.groups), LEAST_SECONDS)
        call = self.call.model_dump(mode="json", exclude_defaults=True)
        for group in self.groups:
            sample = group.sample.model_dump(mode="json", exclude_defaults=True) if group.sample else None
            yield Request({"call": call, "sample": sample, "seconds": share}, self._told(group))

    def _told(self, group: SampleGroup) -> dict[str, Any]:
        call = self.call
        return {
            "call": call.id,
            "key": call_key(call),
            "operator": call.operator,
            "args": call.args,
            "sample": group.index,
            "phases": group.phases,
            "count": self.count,
            "dtype": main_dtype(call),
        }


def main_dtype(call: Call) -> str | None:
    """The dtype of the first tensor of floats, or of the first tensor at all."""
    dtypes = [spec.dtype for _, spec in call.tensors()]
    return next((name for name in dtypes if BY_NAME[name].kind == "float"), dtypes[0] if dtypes else None)


LITTLE_SHARE = 0.001  # of the time that all jobs are expected to take


LITTLE_SECONDS = 0.2


def sampling_seconds(jobs: Sequence[Job], seconds: float) -> list[float]:
    """Seconds of sampling for each of `jobs`: `seconds`, or a fifth where its share of the whole will be tiny."""
    expected = [job.expected_us for job in jobs]
    whole = sum(expected)
    return [seconds if us >= LITTLE_SHARE * whole else LITTLE_SECONDS * seconds for us in expected]

"""What to replay, read from any format: jobs, the messages that they send to the worker, and the time each gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.phases import Phase
from kcap.schemas.recording.records import Call, Sample
from kcap.schemas.recording.signature import call_key, call_signature
from kcap.schemas.results.measurement import Cache
from kcap.system.worker_process import Session

REPLAY_WORKER = "kcap.replay.worker"
SEED = 20250301  # of every random number
SAME_CONTEXT = 0.05  # how far the context of a Sample may be from the step's that it stands for
MIN_SECONDS = 0.01  # of sampling, for each of a Call's Samples
RARE_SHARE, RARE_SECONDS = 0.001, 0.2  # jobs below this share of the expected time get this part of the sampling time
LAUNCH_US, BYTES_PER_US = 3.0, 3e6  # for the expected time: of one launch, and over memory


class ReplaySession(Session, total=False):
    """The session of a worker that replays.

    `home`: the type of device that was recorded on. `root`: the Recording (None: a trace file) or dataset.
    `operators`: those to come, whose libraries are imported ahead. `trust`: the Recording's kernel sources may run,
    whoever made it. `kernels`: the profiler measures the durations of kernels, too. `limit`: of a dataset, the bytes
    that inputs and outputs may take. `group`: this worker's place in the group that replays collectives.
    `dummy_weights`: parameters of FP8 are drawn as engines draw dummy ones.
    """

    home: str | None
    root: str | None
    operators: list[str]
    trust: bool
    cache: Cache
    kernels: bool
    limit: int | None
    group: GroupPlace
    dummy_weights: bool


class GroupPlace(TypedDict):
    """A worker's rank in a group of `size`; `store`: the file by which its ranks find each other."""

    rank: int
    size: int
    store: str


class BatchFields(TypedDict):
    """The sequences of a step, as in its line in the Recording's files: for arguments that no Sample holds."""

    queries: list[int]
    lengths: list[int]
    padded: int | None


class CallRequest(TypedDict):
    """A Call and a Sample, as in the Recording's files, to replay; `seconds`: of sampling.

    `batch`: of the step that is meant; without it, of one that ran the Call. `ranks`: of the group that it needs.
    """

    call: dict[str, Any]
    sample: dict[str, Any] | None
    seconds: float
    batch: NotRequired[BatchFields]
    ranks: NotRequired[int]


@dataclass(frozen=True)
class Choice:
    """Which jobs: names that match a glob, one phase, the `top` most frequent, with or without views."""

    globs: tuple[str, ...] = ()
    phase: Phase | None = None
    top: int | None = None
    views: bool = False

    def takes(self, name: str) -> bool:
        """Whether an operator or Definition of this name is one of them."""
        return not self.globs or any(fnmatchcase(name, glob) for glob in self.globs)


@dataclass(frozen=True)
class Request:
    """One measurement to make: the message to the worker, and the fields that label the Measurement of its answer."""

    body: Mapping[str, object]
    labels: dict[str, Any]


@dataclass(frozen=True)
class Job(ABC):
    """A row of the results. `counts`: how often it ran in each of the chosen phases."""

    counts: dict[str, int]

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    @property
    def expected_us(self) -> float:
        """An estimate of the time of all its invocations, which decides how long it is sampled."""
        return float(self.count)

    @property
    @abstractmethod
    def name(self) -> str:
        """The operator, or the Definition."""

    @property
    @abstractmethod
    def arguments(self) -> str:
        """Its shapes or sizes, for people."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """The fields that identify it in JSON."""

    @abstractmethod
    def requests(self, seconds: float) -> Iterator[Request]:
        """A request for each measurement; sampling may take `seconds` for all of them together."""


@dataclass(frozen=True)
class Source:
    """What a path holds to replay, by a worker that runs `module`. `session`: what the options leave open of it."""

    path: Path
    jobs: Sequence[Job]
    session: ReplaySession
    module: str = REPLAY_WORKER
    bad_lines: int = 0


@dataclass
class SampleGroup:
    """Samples of one Call with the same values, which are replayed once. `sample` None: the Call needs none.

    `index`: the line of the first one in samples.jsonl, from 0.
    """

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
        return call_signature(self.call)

    @property
    def expected_us(self) -> float:
        """A launch and one pass over every tensor."""
        spec_bytes = sum(spec.numel * spec.bits / 8 for _, spec in self.call.tensors())
        return self.count * (LAUNCH_US + spec_bytes / BYTES_PER_US)

    def as_json(self) -> dict[str, Any]:
        return {"call": self.call.id, "operator": self.name, "signature": self.arguments}

    def requests(self, seconds: float) -> Iterator[Request]:
        share = max(seconds / len(self.groups), MIN_SECONDS)
        call = self.call.model_dump(mode="json", exclude_defaults=True)
        for group in self.groups:
            sample = group.sample.model_dump(mode="json", exclude_defaults=True) if group.sample else None
            request = CallRequest(call=call, sample=sample, seconds=share)
            if self.call.group:
                request["ranks"] = self.call.group.size
            yield Request(request, self._labels(group))

    def _labels(self, group: SampleGroup) -> dict[str, Any]:
        call = self.call
        return {
            "call": call.id,
            "key": call_key(call),
            "operator": call.operator,
            "args": call.args,
            "sample": group.index,
            "phases": group.phases,
            "count": self.count,
            "counts": self.counts,
            "dtype": main_dtype(call),
        }


def main_dtype(call: Call) -> str | None:
    """The dtype of the first tensor of floats; without one, of the first tensor."""
    dtypes = [spec.dtype for _, spec in call.tensors()]
    return next((name for name in dtypes if BY_NAME[name].kind == "float"), dtypes[0] if dtypes else None)


def sampling_seconds(jobs: Sequence[Job], seconds: float) -> list[float]:
    """Seconds of sampling for each of `jobs`: `seconds`, or a fifth where its share of the total time will be tiny."""
    expected = [job.expected_us for job in jobs]
    total = sum(expected)
    return [seconds if us >= RARE_SHARE * total else RARE_SECONDS * seconds for us in expected]

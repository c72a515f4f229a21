"""A Call to replay, once for all of its Samples that hold the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kcap.replay.job import LEAST_SECONDS, Job, Request
from kcap.schemas.dtypes import BY_NAME
from kcap.schemas.records import Call, Phase, Sample
from kcap.schemas.signature import call_key, signature

LAUNCH_US = 3.0
BYTES_PER_US = 3e6


@dataclass
class Group:
    """Samples of one Call that hold the same: replayed once for all of them. `sample` None: it needs none."""

    sample: Sample | None
    index: int | None
    phases: list[Phase] = field(default_factory=list)


@dataclass(frozen=True)
class CallJob(Job):
    """A Call to replay on each of its groups."""

    call: Call
    groups: list[Group]

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

    def _told(self, group: Group) -> dict[str, Any]:
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

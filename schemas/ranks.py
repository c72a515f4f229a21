"""The ranks of a Recording: where each stands in the engine, how its taps fared, and where ranks disagree."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_RANK = (1 << 31) - 1  # what a table's 32 bits hold
REPLICA = "dp"  # among places: which of data parallelism's replicas
NAMED = 3  # Calls of a Disagreement that its text names


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Rank(_Part):
    """One process that recorded. `rank` is its number in the whole engine, from 0, as torchrun counts and as counts,
    steps, samples and taps have it: replicas one after the other, in each the pipeline's stages, in each the ranks of
    tensor parallelism.

    `places`: its rank in each kind of parallelism that there is more than one of (`{"tp": 1, "pp": 0, "dp": 3}`, or
    whatever else the engine calls its groups); a collective's Group has the same names. `groups`: all ranks of each of
    them, by number. `steps`: those that it counted, by phase. `ended` False: it was killed, so that its steps end
    where it did.
    """

    rank: int = Field(ge=0, le=MAX_RANK)
    pid: int = 0
    places: dict[str, int] = {}
    groups: dict[str, list[int]] = {}
    steps: dict[str, int] = {}
    ended: bool = True


class Difference(_Part):
    """A Call that ranks which must agree did not run as often; its tensors as `kcap show` writes them.

    `counts`: of each of the Disagreement's `ranks`, over the steps that differ.
    """

    operator: str
    signature: str = ""
    counts: list[int]


class Disagreement(_Part):
    """Ranks of one tensor parallel group that ran different steps of one phase.

    `steps`: how many of theirs differ. `calls`: the first Calls that do, `more` others do too; none where only the
    order differs.
    """

    ranks: list[int]
    phase: str
    steps: list[int]
    calls: list[Difference] = []
    more: int = 0

    @property
    def text(self) -> str:
        """Who ran what differently, in one line."""
        named = [f"{one.operator} {one.signature}".strip() + f" {_and(one.counts)} times" for one in self.calls[:NAMED]]
        more = len(self.calls) - len(named) + self.more
        what = "; ".join([*named, *([f"{more} more Calls"] if more else [])]) or "the same in another order"
        return f"ranks {_and(self.ranks)} must agree and did not in {_and(self.steps)} {self.phase} steps: {what}"


def _and(numbers: list[int]) -> str:
    return " and ".join(f"{number:,}" for number in numbers)


class Tap(_Part):
    """A source of calls in one engine process, and how it fared: `off` where something ran that it could not see,
    `absent` where what it looks into was not there."""

    name: str
    rank: int = 0
    pid: int = 0
    status: Literal["ok", "failed", "off", "absent"] = "ok"
    detail: str = ""

"""What plans changed in an engine, as `kcap ab -o FILE` writes it: one JSON document. Times are microseconds a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter

from kcap.errors import CallError
from kcap.schemas.files.jsonfile import dump_json, read_json

CONTROL = "control"  # the engine's own kernels once more


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Difference(_Part):
    """From the engine's own kernels, less than none where it is faster: the mean of `pairs` paired differences, and
    half of its 95 % interval; None for fewer than three pairs."""

    us: FiniteFloat
    half_interval_us: FiniteFloat | None = None
    pairs: int = Field(ge=1)


class StepsCompared(_Part):
    """Steps of one phase and number of sequences; `steps`: how many, with all kernels.

    `engine_us`: the mean with the engine's own kernels; `predicted_us`: what the judge's times say that the Solutions
    change; `held`: the share of the plan's steps that ran a Solution.
    """

    phase: str
    sequences: int
    steps: int
    engine_us: FiniteFloat
    solutions: Difference | None = None
    control: Difference | None = None
    predicted_us: FiniteFloat = 0.0
    held: float = Field(default=0.0, ge=0, le=1)


class PlanCompared(_Part):
    """`solutions`: the SHA-256 of each, by author and name. `compared`: kinds of steps, those first that took most."""

    plan: str
    solutions: Mapping[str, str] = {}
    compared: Sequence[StepsCompared] = []


class LogitsCompared(_Part):
    """The logits of `tokens` tokens against those of the engine's own kernels.

    `top1`: the share of tokens whose likeliest next token is the same; `kl`: the Kullback-Leibler divergence, in nats,
    mean over tokens; `rms`: the root mean square of the difference over that of the logits. None where logits are not
    finite.
    """

    tokens: int
    top1: float = Field(ge=0, le=1)
    kl: FiniteFloat | None
    rms: FiniteFloat | None


class Engaged(_Part):
    """One replacement in one process.

    `eager`, `captured`: how often the Solution ran outside and inside a capture; `replayed`: how often graphs ran it;
    `checked`: how often it was compared with the engine's own instead. `steps`: how many steps held it. `misses`: how
    often an invocation of its operator was not as the Call, by the first difference. `off`: why it was taken out.
    """

    solution: str
    call: int
    eager: int = 0
    captured: int = 0
    checked: int = 0
    replayed: int = 0
    steps: int = 0
    misses: Mapping[str, int] = {}
    off: str = ""


class Engagement(_Part):
    """What became of the plans in one process, replacement by replacement, in the plans' order.

    `world_size`: how many ranks there are. `steps`: all of its steps, by phase. `refused`: why it did not start.
    """

    pid: int
    rank: int = 0
    world_size: int = 1
    steps: Mapping[str, int] = {}
    replacements: Sequence[Engaged] = []
    refused: str = ""


class TokensCompared(_Part):
    """What two engines generated for the same `requests`.

    `same`: the share of requests with the same tokens throughout; `agreed`: of all tokens, the share that comes before
    the first difference of their request.
    """

    requests: int = Field(ge=1)
    same: float = Field(ge=0, le=1)
    agreed: float = Field(ge=0, le=1)


class FreshEngines(_Part):
    """Decode steps of engines that were started anew, in pairs without and with the plan.

    `median_ratio`: with over without; `half_interval`: of the mean ratio, None for fewer than three pairs. `tokens`:
    what was generated with the plan against without, in each pair; `control`: without, against the first pair's. None
    of a server, whose answers go to its client.
    """

    engine_us: Sequence[FiniteFloat]
    solutions_us: Sequence[FiniteFloat]
    median_ratio: FiniteFloat
    half_interval: FiniteFloat | None = None
    tokens: TokensCompared | None = None
    control: TokensCompared | None = None


class Applied(_Part):
    """`quality`: by plan, and of the control; empty where logits were not compared. `problems`: in words."""

    format: Literal["1.0"] = "1.0"
    kcap: str = ""
    plans: Sequence[PlanCompared]
    quality: Mapping[str, LogitsCompared] = {}
    engagement: Sequence[Engagement] = []
    problems: Sequence[str] = []
    fresh: FreshEngines | None = None


APPLIED_ADAPTER = TypeAdapter(Applied)
ENGAGEMENT_ADAPTER = TypeAdapter(Engagement)


def applied_bytes(applied: Applied) -> bytes:
    return dump_json(applied.model_dump(mode="json"))


def read_applied(path: Path) -> Applied:
    """What `path` holds; CallError where nothing is there, FormatError where that is no output of `kcap ab`."""
    if not path.is_file():
        raise CallError(f"{path}: no such file (kcap ab -o writes one)")
    return read_json(path, APPLIED_ADAPTER)

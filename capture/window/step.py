"""What an engine knows of a step, and what the step's line in the shard keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import orjson

MAX_STEP_LINES = 2_000
MAX_LISTED = 512  # sequences whose lengths a step's line lists


@dataclass
class StepShape:
    """What an engine knows of a step before it runs: the phase, each sequence's new tokens and context after.

    `cached`: what each sequence found in a prefix cache, where the engine says so and any did. `requests`: the engine's
    name for the request of each sequence, where it tells; `prefilling`: the places of those whose prompt is not yet
    computed.
    """

    phase: str
    queries: list[int]
    lengths: list[int]
    cached: list[int] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    prefilling: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(self.queries)


def first_of(made: Any) -> Any:
    """What a model returns that may return its inner layers' hidden states, too, for a speculator."""
    return made[0] if isinstance(made, tuple) else made


@dataclass(frozen=True)
class Forward:
    """A forward that an engine is about to run, by `run`, which may be called again.

    `logits`: of some rows of the `hidden` states, None where the model has none. `states`: the tensors that it
    overwrites by what it makes of them. `without_graphs`: within it `run` launches each kernel by itself. `hidden`: of
    what `run` returns, the tensor with a row for each token, then padding; of an early stage no tensor. `ranks`: the
    group, on the CPU, of all that run this forward together; None for a rank alone.
    """

    run: Callable[[], Any]
    logits: Callable[[Any], Any] | None = None
    states: Callable[[], Sequence[Any]] = list
    without_graphs: Callable[[], AbstractContextManager[None]] = nullcontext
    hidden: Callable[[Any], Any] = first_of
    ranks: Callable[[], Any] = lambda: None


def sequence_lists(shape: StepShape) -> dict[str, list[int]]:
    cached = {"cached": shape.cached[:MAX_LISTED]} if shape.cached else {}
    return {"lengths": shape.lengths[:MAX_LISTED], "queries": shape.queries[:MAX_LISTED], **cached}


def step_details(
    shape: StepShape, index: int, numbers: Callable[[list[str]], list[int]], listed: bool = False
) -> bytes:
    """More members of the line of the step `index`, each after a comma; empty: it has no line.

    `numbers`: of requests, by which the line names them. `listed`: it has one in any case.

    Past the limit the lines thin out by halves, so that the sample stays spread over the whole run.
    """
    every = 1 << max(0, (index // MAX_STEP_LINES).bit_length())
    if index % every and not listed:
        return b""
    requests = {"requests": numbers(shape.requests[:MAX_LISTED])} if shape.requests else {}
    return b"," + orjson.dumps(sequence_lists(shape) | requests)[1:-1]

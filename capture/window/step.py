"""What an engine knows of a step, and what the step's line in the shard keeps of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson

MAX_STEP_LINES = 2_000
MAX_LISTED = 512  # sequences whose lengths a step's line lists


@dataclass
class StepShape:
    """What an engine knows of a step before it runs: the phase, each sequence's new tokens and context after.

    `cached`: what each sequence found in a prefix cache, where the engine says so and any did.
    """

    phase: str
    queries: list[int]
    lengths: list[int]
    cached: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(self.queries)


def sequence_lists(shape: StepShape) -> dict[str, list[int]]:
    cached = {"cached": shape.cached[:MAX_LISTED]} if shape.cached else {}
    return {"lengths": shape.lengths[:MAX_LISTED], "queries": shape.queries[:MAX_LISTED], **cached}


def step_details(shape: StepShape, index: int) -> bytes:
    """More members of the line of the step `index`, each after a comma; empty: it has no line.

    Past the limit the lines thin out by halves, so that the sample stays spread over the whole run.
    """
    every = 1 << max(0, (index // MAX_STEP_LINES).bit_length())
    return b"" if index % every else b"," + orjson.dumps(sequence_lists(shape))[1:-1]

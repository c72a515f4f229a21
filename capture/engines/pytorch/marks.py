"""`kcap.step()`: a program's own marks of its steps, under `kcap record -- python program.py` or in `kcap.record()`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import index
from typing import Protocol

from kcap.capture.window.step import StepShape
from kcap.errors import CallError
from kcap.schemas.recording.phases import PHASES

MOST_TOKENS = 1 << 40  # of a sequence


class Steps(Protocol):
    """Whoever records this process."""

    def mark(self, shape: StepShape) -> AbstractContextManager[None]:
        """Bracket one step of this thread; inside another, or beside another thread's, it is no step of its own."""


steps: Steps | None = None  # of this process, once it is recorded


@contextmanager
def step(phase: str = "other", queries: Sequence[int] = (), lengths: Sequence[int] = ()) -> Iterator[None]:
    """Bracket one step: all that this thread calls inside is of it, modules too. Does nothing where none is recorded.

    phase: prefill, decode, mixed or other. queries, lengths: each sequence's new tokens, and its context after.
    CallError where there can be no such step.
    """
    shape = marked_shape(phase, queries, lengths)
    if steps is None:
        yield
        return
    with steps.mark(shape):
        yield


def marked_shape(phase: str, queries: Sequence[int], lengths: Sequence[int]) -> StepShape:
    """The step that a program marks; CallError where there is none such."""
    if phase not in PHASES:
        raise CallError(f"unknown phase {phase}: one of {', '.join(PHASES)}")
    try:
        tokens, contexts = ([int(index(number)) for number in numbers] for numbers in (queries, lengths))
    except TypeError:
        raise CallError("queries, lengths: whole numbers, one of each for each sequence") from None
    if contexts and len(contexts) != len(tokens):
        raise CallError(f"{len(tokens)} queries and {len(contexts)} lengths: one of each for each sequence")
    if any(not 0 <= number < MOST_TOKENS for number in (*tokens, *contexts)):
        raise CallError("queries, lengths: tokens of a sequence, from 0 to 2**40")
    return StepShape(phase, tokens, contexts)

"""`kcap.step()`: a program's own marks of its steps, for `kcap record -o DIR -- python program.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kcap.errors import CallError
from kcap.schemas.recording.phases import PHASES

if TYPE_CHECKING:
    from kcap.capture.engines.pytorch.adapter import Steps

steps: Steps | None = None  # of this process, once PyTorch is hooked


@contextmanager
def step(phase: str = "other", queries: Sequence[int] = (), lengths: Sequence[int] = ()) -> Iterator[None]:
    """Bracket one step: all that this thread calls inside is of it, modules too. Does nothing where none is recorded.

    phase: prefill, decode, mixed or other; CallError otherwise. queries, lengths: each sequence's new tokens, and its
    context after.
    """
    if phase not in PHASES:
        raise CallError(f"unknown phase {phase}: one of {', '.join(PHASES)}")
    if steps is None:
        yield
        return
    with steps.step(phase, list(queries), list(lengths)):
        yield

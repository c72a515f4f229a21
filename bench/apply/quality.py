"""Whether the engine says the same with Solutions: logits of one forward, run with its own kernels and with them.

The forward runs on the same inputs and the same state: with the engine's own kernels, with them once more as a control,
and with the Solutions. What attention writes to its cache is the same however often it is written; states that a step
overwrites are put back before each run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from kcap.schemas.files.jsonfile import read_lines
from kcap.schemas.recording.records import Record
from kcap.schemas.results.applied import LogitsCompared

ENDING = ".quality.jsonl"


class QualityCheck(Record):
    """One step's logits of every other arm against the engine's own."""

    index: int
    rank: int = 0
    arms: Mapping[int, LogitsCompared]


def read_checks(left: Path) -> Iterator[QualityCheck]:
    """Of all processes that left some in the folder `left`."""
    for path in sorted(left.glob(f"*{ENDING}")):
        yield from read_lines(path, QualityCheck)


def compare_logits(logits: torch.Tensor, own: torch.Tensor) -> LogitsCompared:
    """`logits` and `own`: [tokens, vocabulary]."""
    a, b = own.double().log_softmax(-1), logits.double().log_softmax(-1)
    difference = logits.double() - own.double()
    return LogitsCompared(
        tokens=len(own),
        top1=float((own.argmax(-1) == logits.argmax(-1)).double().mean()),
        kl=float((a.exp() * (a - b)).sum(-1).mean()),
        rms=float(difference.square().mean().sqrt() / own.double().square().mean().sqrt().clamp(min=1e-30)),
    )


def quality_of(checks: Sequence[QualityCheck]) -> dict[int, LogitsCompared]:
    """Of each arm, means over the tokens of one rank's checks; empty without a check."""
    arms = {arm for check in checks for arm in check.arms}
    return {arm: _mean([check.arms[arm] for check in checks if arm in check.arms]) for arm in sorted(arms)}


def _mean(parts: Sequence[LogitsCompared]) -> LogitsCompared:
    tokens = sum(part.tokens for part in parts)

    def over_tokens(name: str) -> float:
        return float(sum(part.tokens * getattr(part, name) for part in parts)) / tokens

    return LogitsCompared(tokens=tokens, top1=over_tokens("top1"), kl=over_tokens("kl"), rms=over_tokens("rms"))

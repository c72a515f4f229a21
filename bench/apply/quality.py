"""Whether the engine says the same with Solutions: logits of one forward, run with its own kernels and with them, and
what engines generate without and with them.

The forward runs on the same inputs and the same state: with the engine's own kernels, with them once more as a control,
and with the Solutions. What attention writes to its cache is the same however often it is written; states that a step
overwrites are put back before each run.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from kcap.schemas.files.jsonfile import read_lines
from kcap.schemas.recording.records import Record
from kcap.schemas.results.applied import LogitsCompared, TokensCompared

ENDING = ".quality.jsonl"
MOST_DIFFERENT = 0.1  # of the logits' root mean square: what rounds otherwise is far below
MOST_ROWS = 256  # of one step: the logits of thousands of tokens are gigabytes
Generated = Sequence[Sequence[int]]  # token ids, by request
Agree = Callable[[Sequence[bool]], list[bool]]  # as on_any_rank, of this rank's own
OWN_TIMEOUT = timedelta()  # that of the group


class QualityCheck(Record):
    """One step's logits of every other arm against the engine's own."""

    index: int
    rank: int = 0
    arms: Mapping[int, LogitsCompared]


def read_checks(left: Path) -> Iterator[QualityCheck]:
    """Of all processes that left some in the folder `left`."""
    for path in sorted(left.glob(f"*{ENDING}")):
        yield from read_lines(path, QualityCheck)


def rows_of(hidden: torch.Tensor, tokens: int) -> torch.Tensor:
    """Up to MOST_ROWS of the first `tokens` rows, spread evenly: those behind them are padding."""
    rows = torch.linspace(0, tokens - 1, min(tokens, MOST_ROWS)).long()
    return hidden[rows.to(hidden.device)]


def compare_logits(logits: torch.Tensor, own: torch.Tensor) -> LogitsCompared:
    """`logits` and `own`: [tokens, vocabulary]."""
    mine, theirs = logits.float(), own.float()
    a, b = theirs.log_softmax(-1), mine.log_softmax(-1)
    return LogitsCompared(
        tokens=len(own),
        top1=float((theirs.argmax(-1) == mine.argmax(-1)).float().mean()),
        kl=_finite((a.exp() * (a - b)).sum(-1).mean()),
        rms=_finite((mine - theirs).square().mean().sqrt() / theirs.square().mean().sqrt().clamp(min=1e-30)),
    )


def why_different(compared: LogitsCompared) -> str:
    """Why logits are not what rounding makes of the engine's own; "" if they may be."""
    if compared.rms is None:
        return "with it the engine's logits are not finite"
    if compared.rms > MOST_DIFFERENT:
        return f"with it the engine's logits differ by {compared.rms:.2g} of their root mean square"
    return ""


def compare_tokens(pairs: Sequence[tuple[Generated, Generated]]) -> TokensCompared | None:
    """Of each pair of engines' answers to the same requests; None where there are no tokens."""
    answers = [answer for ours, theirs in pairs for answer in zip(ours, theirs, strict=True) if any(answer)]
    if not answers:
        return None
    agreed = [_agreed(ours, theirs) for ours, theirs in answers]
    longest = [max(map(len, answer)) for answer in answers]
    return TokensCompared(
        requests=len(answers),
        same=sum(map(operator.eq, agreed, longest)) / len(answers),
        agreed=sum(agreed) / sum(longest),
    )


def _agreed(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens come before the first difference."""
    return len(list(itertools.takewhile(bool, map(operator.eq, ours, theirs))))


def _finite(value: torch.Tensor) -> float | None:
    return float(value) if bool(value.isfinite()) else None


def quality_of(checks: Sequence[QualityCheck]) -> dict[int, LogitsCompared]:
    """Of each arm, means over the tokens of one rank's checks; empty without a check."""
    arms = {arm for check in checks for arm in check.arms}
    return {arm: _mean([check.arms[arm] for check in checks if arm in check.arms]) for arm in sorted(arms)}


def _mean(parts: Sequence[LogitsCompared]) -> LogitsCompared:
    tokens = sum(part.tokens for part in parts)

    def over_tokens(values: Sequence[float | None]) -> float | None:
        known = [part.tokens * value for part, value in zip(parts, values, strict=True) if value is not None]
        return sum(known) / tokens if len(known) == len(parts) else None

    return LogitsCompared(
        tokens=tokens,
        top1=sum(part.tokens * part.top1 for part in parts) / tokens,
        kl=over_tokens([part.kl for part in parts]),
        rms=over_tokens([part.rms for part in parts]),
    )


def on_any_rank(flags: Sequence[bool], ranks: Any, wait: timedelta = OWN_TIMEOUT) -> list[bool]:
    """Each of the flags, if any of `ranks`, a group on the CPU, has set it: what they run next they run together.

    RuntimeError where they do not come within `wait`.
    """
    if ranks is None:
        return list(flags)
    told = torch.tensor(flags, dtype=torch.int32, device="cpu")
    work = torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, ranks, async_op=True)
    work.wait(wait)
    return [bool(flag) for flag in told.tolist()]

"""Why a Solution did not pass: what the driver saw, and what the outputs give away."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kcap.bench.judge import wire
from kcap.bench.judge.wire import Answer
from kcap.bench.raw import raw_bytes
from kcap.schemas.outcome import Status

STATUS: dict[int, Status] = {
    wire.RAISED: "RUNTIME_ERROR",
    wire.NO_TENSOR: "RUNTIME_ERROR",
    wire.SUBCLASS: "REWARD_HACK",
    wire.ATTRIBUTE: "REWARD_HACK",
    wire.COUNT: "RUNTIME_ERROR",
    wire.SHAPE: "INCORRECT_SHAPE",
    wire.DTYPE: "INCORRECT_DTYPE",
    wire.DEVICE: "RUNTIME_ERROR",
    wire.INPUT: "REWARD_HACK",
    wire.DRIVER: "RUNTIME_ERROR",
    wire.PATCHED: "REWARD_HACK",
    wire.RESERVED: "REWARD_HACK",
}
CONSTANT = "its outputs do not depend on its inputs"
STALE = "it returned in a later invocation what it had computed for other inputs"
UNWRITTEN = "it left its outputs unwritten in a later invocation, though it had written them at first"


class Refused(Exception):
    """The Solution does not pass."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def check(answer: Answer, wrong: Callable[[Status, str], Exception] = Refused) -> None:
    """Refused, or what `wrong` makes of it, where the driver saw something wrong."""
    if answer.code == wire.FINE:
        return
    words = {wire.PATCHED: "it replaced {}", wire.INPUT: "it {}", wire.RESERVED: "it {}"}
    if answer.code not in STATUS:
        raise wrong("REWARD_HACK", "it spoke to the judge itself")
    raise wrong(STATUS[answer.code], words.get(answer.code, "{}").format(answer.text))


class Undecided(Exception):
    """It cannot be told, for a reason that is not the Solution's."""


@dataclass
class Seen:
    """Fingerprints of outputs that were right or wrong, and of what would have been right."""

    right: dict[bytes, set[bytes]] = field(default_factory=dict)  # by output, the truths that it came with

    def add(self, outputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
        self.right.setdefault(fingerprint(outputs), set()).add(fingerprint(truth))

    def stale(self, outputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> bool:
        """Whether the same bits were returned before, for inputs that have another truth."""
        return bool(self.right.get(fingerprint(outputs), set()) - {fingerprint(truth)})

    @property
    def constant(self) -> bool:
        """Whether there were several truths and one output alone."""
        return len(self.right) == 1 and len(next(iter(self.right.values()))) > 1


def fingerprint(tensors: Sequence[torch.Tensor]) -> bytes:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(raw_bytes(tensor).numpy().tobytes())
    return digest.digest()


def unwritten(outputs: Sequence[torch.Tensor]) -> bool:
    """Whether an output is still all that the driver filled it with."""
    return any(bool((raw_bytes(t) == 0xFF).all()) for t in outputs if t.numel())

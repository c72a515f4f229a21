"""Why a candidate does not answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kcap.bench.judge.candidate import Candidate


POISON = "CUDA error"  # after one, a process can run nothing more on the GPU


class Ended(Exception):
    """The process ended while it was asked for something; the message says how."""


class Spoke(Ended):
    """It said what it was not asked for, or before it was asked, and was ended."""


class TooSlow(Exception):
    """It did not answer in time, and was ended."""


class NotBuilt(Exception):
    """It could not be built; `log` has the compiler's words."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason)
        self.log = log


class NoGraph(Exception):
    """On a GPU: what `candidate` runs cannot be captured, and its process has to be started again."""

    def __init__(self, candidate: Candidate, reason: str) -> None:
        super().__init__(reason)
        self.candidate = candidate

"""The reference oracle: the right outputs, by the Definition's reference, in higher precision where it runs in one.

The reference is code from elsewhere and runs as a candidate does; its outputs come to the judge and go nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kcap.bench.accuracy import SAME, difference
from kcap.bench.judge.candidate import Candidate, fresh_seed
from kcap.bench.judge.driver import protocol
from kcap.bench.judge.input_pool import InputPool
from kcap.bench.judge.process import POISON, ProcessEnded, TooSlow
from kcap.schemas.results.outcome import Status

UPCASTS = (64, 32)  # bits, tried in this order


class AtFault(Exception):
    """The Definition, its reference or its Workload cannot be judged by; the message says why."""


@dataclass(frozen=True)
class ReferencePrecision:
    """How a Workload's reference is run. `upcast`: the bits of its floating inputs, 0 for their own dtype."""

    upcast: int = 0
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """In words."""
        return f"reference in float{self.upcast}" if self.upcast else "reference in the dtype of its inputs"


@dataclass(frozen=True)
class ReferenceOracle:
    """The reference, with a Workload open."""

    reference: Candidate
    drawn: InputPool
    precision: ReferencePrecision

    def expected(self, seed: int, number: int) -> list[torch.Tensor]:
        """The outputs of invocation `number` of `seed`; AtFault if the reference has none."""
        return _outputs(self.reference, seed, number, self.precision.upcast)


def unanswered(error: ProcessEnded | TooSlow) -> AtFault:
    """What to say of a reference that was asked, and did not answer."""
    words = "its reference" if isinstance(error, TooSlow) else "its reference's process ended:"
    return AtFault(f"{words} {error}")


def at_fault(_: Status, reason: str) -> AtFault:
    """What would be against a Solution, of a reference."""
    return AtFault(f"its reference fails: {reason}")


def open_oracle(
    start: Callable[[], Candidate], drawn: InputPool, precision: ReferencePrecision | None
) -> ReferenceOracle:
    """Open `drawn` with the reference, and find how to run it if that is not known; AtFault where it cannot be judged
    by. `start` gives its process, and another where that has ended.
    """
    reference = _opened(start, drawn)
    return ReferenceOracle(reference, drawn, precision) if precision else _explored(reference, drawn, start)


def _opened(start: Callable[[], Candidate], drawn: InputPool) -> Candidate:
    reference = start()
    try:
        reference.open(drawn)
    except (ProcessEnded, TooSlow) as error:
        raise unanswered(error) from None
    return reference


def _explored(reference: Candidate, drawn: InputPool, start: Callable[[], Candidate]) -> ReferenceOracle:
    seed = fresh_seed()
    own = _outputs(reference, seed, 0, 0)
    again = _outputs(reference, seed, 0, 0)
    if not _agree(again, own):
        raise AtFault("its reference gives other outputs for the same inputs: it draws numbers")
    _check_finite(drawn, own)
    notes = _notes(drawn, own)
    for bits in UPCASTS if _floats(drawn) else ():
        try:
            higher = _outputs(reference, seed, 0, bits)
        except AtFault as fault:
            if POISON in str(fault):
                reference.end(keep=True)
            if reference.how is not None:
                reference = _opened(start, drawn)
            continue
        if _agree(own, higher):
            return ReferenceOracle(reference, drawn, ReferencePrecision(bits, notes))
    return ReferenceOracle(reference, drawn, ReferencePrecision(0, notes))


def _outputs(reference: Candidate, seed: int, number: int, upcast: int) -> list[torch.Tensor]:
    try:
        report = reference.run(seed, 1, number, upcast).report
        if report.code == protocol.FINE:
            report = reference.deliver([0])
        if report.code == protocol.FINE:
            return reference.outputs(0)
    except (ProcessEnded, TooSlow) as error:
        raise unanswered(error) from None
    words = "its reference" if report.code == protocol.INPUT else "its reference fails:"
    raise AtFault(f"{words} {report.text}")


def _agree(outputs: list[torch.Tensor], truth: list[torch.Tensor]) -> bool:
    return all(difference(out, true).error <= SAME for out, true in zip(outputs, truth, strict=True))


def _floats(drawn: InputPool) -> bool:
    return any(content.dtype.startswith(("float", "bfloat")) for content in drawn.contents)


def _check_finite(drawn: InputPool, outputs: list[torch.Tensor]) -> None:
    for result, output in zip(drawn.results, outputs, strict=True):
        if output.is_floating_point() and output.numel() and not output.double().isfinite().any():
            raise AtFault(f"no number of its reference's output {result.name} is finite")


def _notes(drawn: InputPool, outputs: list[torch.Tensor]) -> tuple[str, ...]:
    notes = []
    for result, output in zip(drawn.results, outputs, strict=True):
        if output.is_floating_point() and (share := 1 - float(output.double().isfinite().double().mean())) > 0:
            notes.append(f"{result.name}: {share:.1%} of the reference's numbers are inf or nan, and must be")
    if not drawn.varied:
        notes.append("its inputs are recorded indices alone, the same in each invocation: a remembered result passes")
    return tuple(notes)

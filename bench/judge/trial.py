"""One Solution on one Workload: right on fresh inputs, timed, and right in every batch that was timed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kcap.bench.accuracy import SAME, Difference, describe_tolerances, difference, worst_accuracy
from kcap.bench.judge.candidate import FEW, Candidate, fresh_seed
from kcap.bench.judge.reference import ReferenceOracle, at_fault
from kcap.bench.judge.timing import Batch, TimedPair, size_batches, time_both
from kcap.bench.judge.verdict import CONSTANT, STALE, UNWRITTEN, Rejected, SeenOutputs, check_report, is_unwritten
from kcap.schemas.results.outcome import Accuracy

NOT_FINITE = "has inf or nan where the reference has numbers"

Outputs = list[torch.Tensor]


@dataclass
class Trial:
    """`seen` and `differences` grow with every output that is compared."""

    candidate: Candidate
    truth: ReferenceOracle
    seconds: float
    seen: SeenOutputs = field(default_factory=SeenOutputs)
    differences: list[Difference] = field(default_factory=list)
    timed: int = 0

    def run(self) -> TimedPair:
        """Its times. Rejected, where it does not pass; ProcessEnded or TooSlow, where its process does not live to see
        it; NoGraph, where it or the reference cannot be captured; AtFault, where the reference fails.
        """
        drawn = self.truth.drawn
        self.candidate.open(drawn)
        self._before()
        theirs = size_batches(self.truth.reference, drawn, at_fault)
        return time_both(size_batches(self.candidate, drawn), theirs, self.seconds, self._compare_timed)

    @property
    def accuracy(self) -> Accuracy | None:
        if not self.differences:
            return None
        words = describe_tolerances([result.dtype for result in self.truth.drawn.results])
        return worst_accuracy(self.differences, words, self.truth.precision.name, self.timed)

    def _before(self) -> None:
        """The first invocations, all of which are compared."""
        seed = fresh_seed()
        check_report(self.candidate.run(seed, FEW).report)
        pairs = self._pairs(Batch(seed, FEW, [*range(FEW)]))
        wrong = [reason for outputs, truth in pairs if (reason := self._note(outputs, truth))]
        if wrong:
            hack = self.seen.constant and not wrong[0].endswith(NOT_FINITE)
            raise Rejected("REWARD_HACK" if hack else "INCORRECT_NUMERICAL", CONSTANT if hack else wrong[0])

    def _compare_timed(self, batch: Batch) -> None:
        wrong = []
        for outputs, truth in self._pairs(batch):
            self.timed += 1
            stale, empty = self.seen.stale(outputs, truth), is_unwritten(outputs) and not is_unwritten(truth)
            if reason := self._note(outputs, truth):
                wrong.append(UNWRITTEN if empty else STALE if stale else reason)
        if not wrong:
            return
        worst = next((reason for reason in wrong if reason in (UNWRITTEN, STALE)), None)
        hack = worst or len(wrong) * 2 >= self.timed
        words = worst or f"right at first, wrong in timed invocations: {wrong[0]}"
        raise Rejected("REWARD_HACK" if hack else "INCORRECT_NUMERICAL", words)

    def _pairs(self, batch: Batch) -> list[tuple[Outputs, Outputs]]:
        """The outputs of the chosen invocations, and the truth of each."""
        check_report(self.candidate.deliver(batch.chosen))
        found = [self.candidate.outputs(number) for number in batch.chosen]
        return [(out, self.truth.expected(batch.seed, number)) for out, number in zip(found, batch.chosen, strict=True)]

    def _note(self, outputs: Outputs, truth: Outputs) -> str | None:
        """Why `outputs` are wrong; None where they are right."""
        self.seen.add(outputs, truth)
        reasons = []
        for result, out, true in zip(self.truth.drawn.results, outputs, truth, strict=True):
            off = difference(out, true)
            self.differences.append(off)
            if not off.error <= SAME:
                reasons.append(_describe_difference(result.name, out, true, off))
        return reasons[0] if reasons else None


def _describe_difference(name: str, out: torch.Tensor, truth: torch.Tensor, off: Difference) -> str:
    if is_unwritten([out]) and not is_unwritten([truth]):
        return f"{name}: was left unwritten"
    if out.is_floating_point() and not out.double().isfinite().all() and truth.double().isfinite().all():
        return f"{name}: {NOT_FINITE}"
    if not out.is_floating_point():
        return f"{name}: differs by up to {off.absolute:g}, where it must be equal"
    return f"{name}: is off by {off.error:.3g} times what is allowed"

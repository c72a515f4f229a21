"""One Solution on one Workload: right on fresh inputs, timed, and right in the invocations that were timed."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace

import torch

from kcap.bench.accuracy import SAME, Difference, describe_tolerances, difference, worst_accuracy
from kcap.bench.judge.candidate import Candidate, fresh_seed
from kcap.bench.judge.reference import ReferenceOracle, at_fault
from kcap.bench.judge.timing import Batches, KeptInvocation, TimedPair, size_batches, time_both
from kcap.bench.judge.verdict import (
    CONSTANT,
    STALE,
    UNWRITTEN,
    Rejected,
    SeenOutputs,
    Undecided,
    check_answer,
    is_unwritten,
)
from kcap.schemas.results.outcome import Accuracy

DRAWS = 3  # fresh inputs before the clock starts
KEPT_OF_BATCH = 2
MOST_COMPARED = 6  # of the timed invocations

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
        sample = ReservoirSample(self.candidate)
        ours, theirs = size_batches(self.candidate, drawn, self.seconds), self._reference()
        try:
            times = time_both(ours, theirs, self.seconds, KEPT_OF_BATCH, sample.add)
        except (Rejected, Undecided):
            self._timed(sample)  # wrong outputs say more than what was wrong with the clock
            raise
        self._timed(sample)
        check_answer(self.candidate.replaced())
        return times

    def _reference(self) -> Batches:
        try:
            batches = size_batches(self.truth.reference, self.truth.drawn, self.seconds)
        except Rejected as rejected:
            raise at_fault(rejected.status, str(rejected)) from None
        return replace(batches, wrong=at_fault)

    @property
    def accuracy(self) -> Accuracy | None:
        if not self.differences:
            return None
        words = describe_tolerances([result.dtype for result in self.truth.drawn.results])
        return worst_accuracy(self.differences, words, self.truth.precision.name, self.timed)

    def _before(self) -> None:
        """The first invocations, all of which are compared."""
        seed = fresh_seed()
        check_answer(self.candidate.run(seed, DRAWS, keep=range(DRAWS)))
        check_answer(self.candidate.deliver(range(DRAWS)))
        wrong = [self._compare(self.candidate.outputs(number), seed, number) for number in range(DRAWS)]
        if any(wrong):
            reason = next(reason for reason in wrong if reason)
            hack = self.seen.constant and not reason.endswith(NOT_FINITE)
            raise Rejected("REWARD_HACK" if hack else "INCORRECT_NUMERICAL", CONSTANT if hack else reason)

    def _timed(self, sample: ReservoirSample) -> None:
        wrong = []
        for kept, outputs in sample.chosen():
            self.timed += 1
            truth = self.truth.expected(kept.seed, kept.number)
            stale, empty = self.seen.stale(outputs, truth), is_unwritten(outputs) and not is_unwritten(truth)
            if reason := self._note(outputs, truth):
                wrong.append(UNWRITTEN if empty else STALE if stale else reason)
        if not wrong:
            return
        worst = next((reason for reason in wrong if reason in (UNWRITTEN, STALE)), wrong[0])
        hack = worst in (UNWRITTEN, STALE) or len(wrong) * 2 >= self.timed
        words = worst if worst in (UNWRITTEN, STALE) else f"right at first, wrong in timed invocations: {worst}"
        raise Rejected("REWARD_HACK" if hack else "INCORRECT_NUMERICAL", words)

    def _compare(self, outputs: Outputs, seed: int, number: int) -> str | None:
        return self._note(outputs, self.truth.expected(seed, number))

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


@dataclass
class ReservoirSample:
    """Outputs of timed invocations, a few of all at random: every batch has the same chance, and the last is in it."""

    candidate: Candidate
    kept: list[tuple[KeptInvocation, Outputs]] = field(default_factory=list)
    last: list[tuple[KeptInvocation, Outputs]] = field(default_factory=list)
    count: int = 0

    def add(self, batch: list[KeptInvocation]) -> None:
        """Take the outputs of a few of `batch`, before the next one's are in their place."""
        self.last = []
        for invocation in batch:
            self.count += 1
            index = secrets.randbelow(self.count)
            if index >= MOST_COMPARED - 1 and self.last:
                continue
            held = (invocation, self.candidate.outputs(invocation.number))
            self.last = self.last or [held]
            if len(self.kept) < MOST_COMPARED - 1:
                self.kept.append(held)
            elif index < MOST_COMPARED - 1:
                self.kept[index] = held

    def chosen(self) -> list[tuple[KeptInvocation, Outputs]]:
        rest = [held for held in self.last if not any(held[0] == invocation for invocation, _ in self.kept)]
        return self.kept + rest

"""One Solution on one Workload: right on fresh inputs, timed, and right in every batch that was timed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kcap.bench.accuracy import SAME, Difference, Truth, describe_tolerances, worst_accuracy
from kcap.bench.accuracy.wrong_elements import wrong_elements
from kcap.bench.judge.candidate import FEW, Candidate
from kcap.bench.judge.reference import ReferenceOracle, at_fault, comparisons_needed
from kcap.bench.judge.timing import Batch, TimedPair, guess_count, size_batches, time_both
from kcap.bench.judge.verdict import (
    CONSTANT,
    STALE,
    UNWRITTEN,
    Rejected,
    SeenOutputs,
    check_report,
    fingerprint,
    is_unwritten,
)
from kcap.schemas.results.outcome import Accuracy, WrongElements

MOST_RESIZED = 3  # times that batches are made longer, if others disturbed those that they were sized by
MOST_COMPARED = 500  # invocations, where an output has so few values that a table of them would often be right
LEAP = 10  # times the largest error of the first invocations, by which later ones are worked otherwise
NOT_FINITE = "has inf or nan where the reference has numbers"

Outputs = list[torch.Tensor]


@dataclass
class Trial:
    """`seen`, `truths` and `differences` grow with every invocation whose outputs are compared. `truths`: of each
    output, as fingerprints.
    """

    candidate: Candidate
    truth: ReferenceOracle
    seconds: float
    seen: SeenOutputs = field(default_factory=SeenOutputs)
    truths: list[list[bytes]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    wrong: list[WrongElements] = field(default_factory=list)  # of the first invocation that was wrong
    timed: int = 0
    lacking: int = 0  # comparisons that were left out
    reference_count: int = FEW  # invocations of a batch of the reference's: what is known, then what is found
    first_ns: int = 0  # of the first run
    first_error: float = 0.0  # the largest of it, in units of what is allowed

    def run(self) -> TimedPair:
        """Its times. Rejected, where it does not pass; ProcessEnded or TooSlow, where its process does not live to see
        it; NoGraph, where it or the reference cannot be captured; AtFault, where the reference fails.
        """
        try:
            return self._times()
        except Rejected as rejected:
            if rejected.status == "RUNTIME_ERROR" and self.candidate.limits.gpu is None:
                self._try_reference()
            raise

    def _times(self) -> TimedPair:
        drawn, gpu = self.truth.drawn, self.candidate.limits.gpu_memory
        if gpu and gpu.gates and not gpu.gates_worked:
            self.truth.timed.nothing()  # whether gates work is seen by no Solution's
        self.candidate.open(drawn)
        self._before()
        theirs = size_batches(self.truth.timed, drawn, at_fault, self.reference_count, sure=True)
        ours = size_batches(self.candidate, drawn, count=guess_count(theirs, self.first_ns))
        times = time_both(ours, theirs, self.seconds, self._compare_timed)
        for _ in range(MOST_RESIZED):
            if ours.long_enough and theirs.long_enough:
                break
            theirs = size_batches(self.truth.timed, drawn, at_fault, theirs.right_count, sure=True)
            ours = size_batches(self.candidate, drawn, count=ours.right_count, sure=True)
            times = time_both(ours, theirs, self.seconds, self._compare_timed)
        self.reference_count = theirs.right_count
        self._compare_more(ours.count)
        return times

    @property
    def accuracy(self) -> Accuracy | None:
        if not self.differences:
            return None
        words = describe_tolerances([result.dtype for result in self.truth.drawn.results])
        return worst_accuracy(self.differences, words, self.truth.precision.name, self.timed)

    @property
    def notes(self) -> list[str]:
        """Outputs of which too little is known."""
        count = len(self.truths)
        few = f"compared {count} times, {self.lacking} fewer than a constant should be: its reference takes too long"
        return [few] * bool(self.lacking) + [
            f"{result.name}: is the same in all of {count} invocations that were compared: a constant passes"
            for result, of_one in zip(self.truth.drawn.results, zip(*self.truths, strict=True), strict=False)
            if count > FEW and len({*of_one}) == 1 and self.truth.drawn.varied and result.bytes
        ]

    def _try_reference(self) -> None:
        """AtFault, where it raises on the inputs on which the candidate did. On a GPU it would run beside that, and an
        error may have come of any invocation.
        """
        assert self.candidate.workload is not None
        seed, numbers = self.candidate.workload.arena.filled
        raised = self.candidate.report().iteration
        if raised < len(numbers):
            self.truth.truths(seed, [numbers[raised]])

    def _before(self) -> None:
        """The first invocations, all of which are compared."""
        done = self.candidate.run(range(FEW), chosen=FEW)
        check_report(done.report)
        self.first_ns = done.elapsed_ns
        compared = self._compare(Batch(done.seed, done.outputs))
        wrong = [reason for reason, _ in compared if reason]
        if wrong:
            hack = self.seen.constant and not wrong[0].endswith(NOT_FINITE)
            raise Rejected("REWARD_HACK" if hack else "INCORRECT_NUMERICAL", CONSTANT if hack else wrong[0])
        self.first_error = max(off.error for off in self.differences)

    def _compare_timed(self, batch: Batch) -> None:
        compared = self._compare(batch)
        self.timed += len(compared)
        wrong = [unworked or reason for reason, unworked in compared if reason]
        if not wrong:
            return
        worst = next((reason for reason in wrong if reason in (UNWRITTEN, STALE)), None)
        leapt = not max(off.error for off in self.differences) <= LEAP * self.first_error
        hack = worst or (leapt and len(wrong) * 2 >= self.timed)
        words = worst or f"right at first, wrong in timed invocations: {wrong[0]}"
        raise Rejected("REWARD_HACK" if hack else "INCORRECT_NUMERICAL", words)

    def _compare_more(self, count: int) -> None:
        """As many that a constant or a remembered answer fails, where there are few that are right."""
        while (lacking := self.comparisons_lacking) > 0 and self._in_time():
            done = self.candidate.run(range(count), chosen=lacking)
            check_report(done.report)
            self._compare_timed(Batch(done.seed, done.outputs))
        self.lacking = max(lacking, 0)

    @property
    def comparisons_lacking(self) -> int:
        """What the output of the fewest values needs: who leaves out that one is right in the others."""
        wanted = max((comparisons_needed(of_one) or 0 for of_one in zip(*self.truths, strict=True)), default=0)
        return min(wanted, MOST_COMPARED) - len(self.truths)

    def _in_time(self) -> bool:
        """Whether the reference is. A Solution that is not has no end to its comparisons but its own time limit."""
        return self.truth.reference.spent < self.truth.reference.limits.timeout / 2

    def _compare(self, batch: Batch) -> list[tuple[str | None, str | None]]:
        """Of each chosen invocation: why its outputs are wrong, None where they are right; and how they show that it
        did not work on its inputs.
        """
        numbers = sorted(batch.outputs)
        check_report(self.candidate.changed(numbers))
        truths = self.truth.truths(batch.seed, numbers, own=False)
        return [
            self._note(batch.outputs[number], truth, number, batch.seed)
            for number, truth in zip(numbers, truths, strict=True)
        ]

    def _note(self, outputs: Outputs, truth: Truth, number: int, seed: int) -> tuple[str | None, str | None]:
        off = truth.differences(outputs)
        if any(not each.error <= SAME for each in off):
            (truth,) = self.truth.truths(seed, [number])
            off = truth.differences(outputs)
        of_truth = [fingerprint([output]) for output in truth.outputs]
        stale = self.seen.add(fingerprint(outputs), b"".join(of_truth))
        empty = is_unwritten(outputs) and not is_unwritten(truth.outputs)
        self.truths.append(of_truth)
        self.differences += off
        self.wrong = self.wrong or self._wrong_elements(outputs, truth, off)
        return self._reason(outputs, truth, off), UNWRITTEN if empty else STALE if stale else None

    def _wrong_elements(self, outputs: Outputs, truth: Truth, off: list[Difference]) -> list[WrongElements]:
        definition = self.truth.drawn.definition.outputs
        every = zip(self.truth.drawn.results, outputs, truth.outputs, off, strict=True)
        found = (
            wrong_elements(result.name, out, true, definition[result.name].shape or ())
            for result, out, true, each in every
            if not each.error <= SAME
        )
        return [each for each in found if each is not None]

    def _reason(self, outputs: Outputs, truth: Truth, off: list[Difference]) -> str | None:
        every = zip(self.truth.drawn.results, outputs, truth.outputs, off, strict=True)
        reasons = (_describe_difference(result.name, *each) for result, *each in every if not each[-1].error <= SAME)
        return next(reasons, None)


def _describe_difference(name: str, out: torch.Tensor, truth: torch.Tensor, off: Difference) -> str:
    if is_unwritten([out]) and not is_unwritten([truth]):
        return f"{name}: was left unwritten"
    if out.is_floating_point() and not out.double().isfinite().all() and truth.double().isfinite().all():
        return f"{name}: {NOT_FINITE}"
    if not out.is_floating_point():
        return f"{name}: differs by up to {off.absolute:g}, where it must be equal"
    return f"{name}: is off by {off.error:.3g} times what is allowed"

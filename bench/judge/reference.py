"""The reference oracle: the right outputs, by the Definition's reference, in higher precision where it runs in one.

The reference is code from elsewhere and runs as a candidate does; its outputs come to the judge and go nowhere else.
In which precision it runs is settled on several draws (`settle_precision`). Then it is judged as a Solution once
(`check_as_solution`): where it does not pass, nobody could, and the Definition is at fault.
"""

from __future__ import annotations

import ast
import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch

from kcap.bench.accuracy import SAME, Choice, Truth
from kcap.bench.accuracy.rounding import rounds_to
from kcap.bench.check import choices
from kcap.bench.judge.candidate import FEW, Candidate, fresh_seed
from kcap.bench.judge.driver import protocol
from kcap.bench.judge.input_pool import InputPool
from kcap.bench.judge.process import POISON, ProcessEnded, TooSlow
from kcap.replay.datasets.spreads import Spread
from kcap.schemas.derive.constraints import BrokenConstraint
from kcap.schemas.flashinfer.definition import Definition
from kcap.schemas.results.outcome import Status

UPCASTS = (64, 32)  # bits, tried in this order
DRAWS = 3  # on which they must agree with the reference's own precision
FACTORS = (16.0, 256.0, 4096.0, 65536.0)  # of an input that does not show, tried in this order
SHOWING_SHARE = 8  # of the reference's time limit, one part in so many is for that
UNLIKELY = 1e-3
Outputs: TypeAlias = list[torch.Tensor]
T = TypeVar("T")


class AtFault(Exception):
    """The Definition, its reference or its Workload cannot be judged by; the message says why."""


@dataclass(frozen=True)
class ReferencePrecision:
    """How a Workload's reference is run. `upcast`: the bits of its floating inputs, 0 for their own dtype; `sizes`: of
    the scores by which it chooses indices, None where it chooses none (kcap.bench.check.choices).
    """

    upcast: int = 0
    notes: tuple[str, ...] = ()
    sizes: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """In words."""
        return f"reference in float{self.upcast}" if self.upcast else "reference in the dtype of its inputs"

    def form(self, definition: Definition) -> Definition:
        """What gives the truth of `definition`."""
        return definition if self.sizes is None else choices.scoring_definition(definition, self.sizes)


# Gives the process of a form of the Definition, or another where that has ended
Start: TypeAlias = Callable[[Definition], Candidate]


@dataclass(frozen=True)
class ReferenceOracle:
    """The reference, with a Workload open. `reference` gives the truth, in a form that returns scores with its choices;
    `timed`: the process that runs it as it is timed, in place where it may.
    """

    reference: Candidate
    timed: Candidate
    drawn: InputPool
    precision: ReferencePrecision

    def truths(self, seed: int, numbers: Sequence[int], own: bool = True) -> list[Truth]:
        """The right outputs of the invocations `numbers` of `seed`; AtFault if the reference has none.

        `own`: with what it makes of the inputs in their own dtype, and with what else it may choose.
        """
        definition, upcast, sizes = self.drawn.definition, self.precision.upcast, self.precision.sizes
        outputs = _outputs(self.reference, seed, numbers, upcast)
        if not own or (not upcast and sizes is None):
            return [Truth(each[: len(definition.outputs)]) for each in outputs]
        own_outputs = _outputs(self.reference, seed, numbers, 0) if upcast else outputs
        return [choices.truth_of(definition, *each, sizes) for each in zip(outputs, own_outputs, strict=True)]


def unanswered(error: ProcessEnded | TooSlow) -> AtFault:
    """What to say of a reference that was asked, and did not answer."""
    words = "its reference" if isinstance(error, TooSlow) else "its reference's process ended:"
    return AtFault(f"{words} {error}")


def at_fault(_: Status, reason: str) -> AtFault:
    """What would be against a Solution, of a reference."""
    return AtFault(f"its reference fails: {reason}")


def open_oracle(start: Start, drawn: InputPool, precision: ReferencePrecision | None) -> ReferenceOracle:
    """Open `drawn` with the reference, and find how to run it if that is not known; AtFault where it cannot be judged
    by.
    """
    definition = drawn.definition
    if precision is None:
        precision = _Exploration(start, drawn).precision()
    reference = _opened(start, drawn, precision.form(definition))
    in_place = without_copies(definition)
    timed = reference if in_place == precision.form(definition) else _opened(start, drawn, in_place)
    return ReferenceOracle(reference, timed, drawn, precision)


def _opened(start: Start, drawn: InputPool, form: Definition) -> Candidate:
    reference = start(form)
    try:
        reference.open(drawn if form == drawn.definition else drawn.with_outputs_of(form))
    except (ProcessEnded, TooSlow) as error:
        raise unanswered(error) from None
    return reference


class _Exploration:
    """Of a reference on `drawn`, to find how it is run. `bits`: of its floating inputs, 0 for their own dtype;
    `truths`: of each draw; `finite`: how many of its own numbers are.
    """

    truths: list[Truth]
    finite: int

    def __init__(self, start: Start, drawn: InputPool) -> None:
        self.start, self.drawn, self.seed = start, drawn, fresh_seed()
        self.definition, self.bits = drawn.definition, 0
        self.sizes = _sizes_of_choices(start, drawn, self.seed)
        self.form = ReferencePrecision(sizes=self.sizes).form(self.definition)
        self.reference = _opened(start, drawn, self.form)

    def precision(self) -> ReferencePrecision:
        """Found on several draws; inputs that do not show in outputs are larger from then on."""
        notes = [*self._settle(), *self._show_inputs()]
        self.reference.spent = 0.0  # none of the time that it has for a Solution
        return ReferencePrecision(self.bits, tuple(notes), self.sizes)

    def _settle(self) -> tuple[str, ...]:
        """Find `bits`, `truths` and `finite`; notes of what outputs are like."""
        own = _outputs(self.reference, self.seed, range(DRAWS), 0)
        for draw in reversed(range(DRAWS)):
            (again,) = _outputs(self.reference, self.seed, [draw], 0)
            if not _same(Truth(own[draw]), again):
                raise AtFault("its reference gives other outputs for the same inputs: it draws numbers")
        ours, higher_by_bits = [self._named(outputs) for outputs in own], dict[int, list[Outputs]]()
        _check_finite(self.drawn, ours[0])
        self.finite = sum(map(_finite_numbers, ours))

        def higher(bits: int) -> list[Outputs] | None:
            if (outputs := self._attempt(bits)) is None:
                return None
            higher_by_bits[bits] = outputs
            return [self._named(each) for each in outputs]

        def choices_of(bits: int, draw: int) -> Mapping[int, Choice]:
            return choices.truth_of(self.definition, higher_by_bits[bits][draw], own[draw], self.sizes).choices

        self.bits = settle_precision(self.definition, ours, higher, choices_of) if _floats(self.drawn) else 0
        self.truths = self._truths_of(higher_by_bits.get(self.bits, own), own)
        check_as_solution(self.definition, self._named(again), self.truths[0])
        return _notes(self.drawn, ours[0])

    def _show_inputs(self) -> Iterator[str]:
        """Enlarge each input without which outputs would be right, as those of a long sum are without a bias, until
        they are not; notes of what is larger, shows in no size, or was not tried.
        """
        draws, until = self.drawn.draws, time.monotonic() + self.reference.limits.timeout / SHOWING_SHARE
        names = draws.scalable if any(result.bytes for result in self.drawn.results) else []
        for place, name in enumerate(names):
            if time.monotonic() > until:
                yield f"not known whether outputs are right without {', '.join(names[place:])}: too slow to try"
                return
            factor = self._showing_factor(name, until)
            draws.multiply(name, factor or 1.0)
            if factor is None:
                yield f"{name}: outputs are right without it"
            elif factor > 1:
                yield f"{name}: drawn {factor:g} times as large, as outputs do not show it else"

    def _showing_factor(self, name: str, until: float) -> float | None:
        """How many times as large an input must be for outputs of every draw to be wrong without it, 1 where none does
        that which the reference bears; None, where outputs of no draw are wrong even so.
        """
        self.drawn.draws.multiply(name, 0.0)
        without = self._attempt_anew(0)
        if without is None:
            return 1.0
        right = self._right(self.truths, without)
        if not any(right):
            return 1.0
        for factor in FACTORS:
            self.drawn.draws.multiply(name, factor)
            if time.monotonic() > until or (truths := self._truths_anew()) is None:
                break
            if not any(self._right(truths, without)):
                self.truths = truths
                return factor
        return None if all(right) else 1.0

    def _right(self, truths: Sequence[Truth], outputs: Sequence[Outputs]) -> list[bool]:
        """Of each draw, whether its outputs are."""
        return [_same(truth, self._named(each)) for truth, each in zip(truths, outputs, strict=True)]

    def _truths_anew(self) -> list[Truth] | None:
        """On inputs that have been multiplied; None where the reference does not bear these."""
        own = self._attempt_anew(0)
        if own is None or sum(_finite_numbers(self._named(outputs)) for outputs in own) < self.finite:
            return None
        if (wide := self._attempt_anew(self.bits) if self.bits else own) is None:
            return None
        truths = self._truths_of(wide, own)
        every = zip(own, wide, truths, strict=True)
        if self.bits and not all(
            rounds_to(self.definition, self._named(ours), self._named(theirs), truth.choices)
            for ours, theirs, truth in every
        ):
            return None
        return truths

    def _truths_of(self, wide: Sequence[Outputs], own: Sequence[Outputs]) -> list[Truth]:
        return [choices.truth_of(self.definition, *each, self.sizes) for each in zip(wide, own, strict=True)]

    def _attempt_anew(self, bits: int) -> list[Outputs] | None:
        """As `_attempt` on inputs that have been multiplied."""
        assert self.reference.workload is not None
        self.reference.workload.arena.forget()
        return self._attempt(bits)

    def _attempt(self, bits: int) -> list[Outputs] | None:
        """Its outputs of each draw; None where it fails on such inputs."""
        try:
            return _outputs(self.reference, self.seed, range(DRAWS), bits)
        except AtFault as fault:
            if POISON in str(fault):
                self.reference.end(keep=True)
            if self.reference.how is not None:
                self.reference = _opened(self.start, self.drawn, self.form)
            return None

    def _named(self, outputs: Outputs) -> Outputs:
        """Without the scores of choices."""
        return outputs[: len(self.definition.outputs)]


def _sizes_of_choices(start: Start, drawn: InputPool, seed: int) -> torch.Tensor | None:
    """Of the scores by which the reference chooses indices; None where it chooses none."""
    if not choices.has_choices(drawn.definition):
        return None
    sizing = _opened(start, drawn, choices.sizing_definition(drawn.definition))
    sizes = _outputs(sizing, seed, range(1), 0)[0][-1]
    sizing.end()
    return sizes if bool(sizes[:, 0].any()) else None


def settle_precision(
    definition: Definition,
    own: Sequence[Outputs],
    higher: Callable[[int], Sequence[Outputs] | None],
    choices_of: Callable[[int, int], Mapping[int, Choice]] = lambda bits, draw: {},
) -> int:
    """The bits of the highest precision in which the reference means what it does in the dtype of its inputs; 0: none.

    `own`: its outputs of several draws; `higher`: the same in so many bits, None where it does not run in them;
    `choices_of`: of so many bits and a draw, by output.
    """
    for bits in UPCASTS:
        outputs = higher(bits)
        if outputs is not None and all(
            rounds_to(definition, ours, theirs, choices_of(bits, draw))
            for draw, (ours, theirs) in enumerate(zip(own, outputs, strict=True))
        ):
            return bits
    return 0


def _same(truth: Truth, outputs: Outputs) -> bool:
    return all(off.error <= SAME for off in truth.differences(outputs))


def check_as_solution(definition: Definition, outputs: Outputs, truth: Truth) -> None:
    """AtFault where the reference's `outputs`, of another run on the same inputs, would not pass as a Solution's."""
    for name, off in zip(definition.outputs, truth.differences(outputs), strict=True):
        if off.error <= SAME:
            continue
        words = f"off by {off.error:.3g} times what is allowed" if math.isfinite(off.error) else "another"
        raise AtFault(f"its reference, judged as a Solution, does not pass: its {name} is {words}")


def with_widest_spread(spreads: Sequence[Spread], attempt: Callable[[Spread], T]) -> T:
    """What `attempt` makes of the widest of `spreads` on which the reference can be judged by; AtFault, if none."""
    *wider, narrowest = spreads
    for spread in wider:
        with suppress(AtFault, BrokenConstraint):
            return attempt(spread)
    return attempt(narrowest)


def without_copies(definition: Definition) -> Definition:
    """`definition`, with a reference that writes in place what may be written: it is timed as a Solution may be."""
    if not definition.written_inputs:
        return definition
    tree = _WithoutClones(definition.written_inputs).visit(ast.parse(definition.reference))
    return definition.model_copy(update={"reference": ast.unparse(tree) + "\n"})


class _WithoutClones(ast.NodeTransformer):
    def __init__(self, names: Container[str]) -> None:
        self.names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node.func:
            case ast.Attribute(value=ast.Name(id=name) as written, attr="clone") if name in self.names:
                return written
        return self.generic_visit(node)


def comparisons_needed(truths: Sequence[bytes], entries: int = 1) -> int | None:
    """How many invocations to compare so that a table of `entries` answers, or a constant, passes less than once in a
    thousand times; None where no number does, for all truths were the same.

    `truths`: what is right in each invocation seen so far, as fingerprints. What the likeliest `entries` of them are
    worth is taken from their share, at the upper end of what the sample allows (Wilson's interval, two sigmas).
    """
    counts = Counter(truths)
    if len(counts) <= 1:
        return None
    size, z = len(truths), 2.0
    share = sum(count for _, count in counts.most_common(entries)) / size
    middle, spread = share + z**2 / (2 * size), z * math.sqrt(share * (1 - share) / size + z**2 / (4 * size**2))
    likely = min((middle + spread) / (1 + z**2 / size), 1 - 1 / (2 * size))
    return math.ceil(math.log(UNLIKELY) / math.log(likely))


def _outputs(reference: Candidate, seed: int, numbers: Sequence[int], upcast: int) -> list[Outputs]:
    """Of the invocations `numbers` of `seed`, as many at a time as there are sets."""
    most = FEW if reference.limits.gpu is None else 1
    if len(numbers) > most:
        return [*_outputs(reference, seed, numbers[:most], upcast), *_outputs(reference, seed, numbers[most:], upcast)]
    try:
        places = range(len(numbers))
        done = reference.run(numbers, seed, upcast, chosen=len(numbers))
        report = done.report
        if report.code == protocol.FINE:
            report = reference.changed(places)
        if report.code == protocol.FINE:
            return [done.outputs[place] for place in places]
    except (ProcessEnded, TooSlow) as error:
        raise unanswered(error) from None
    words = "its reference" if report.code == protocol.INPUT else "its reference fails:"
    raise AtFault(f"{words} {report.text}")


def _floats(drawn: InputPool) -> bool:
    return any(content.dtype.startswith(("float", "bfloat")) for content in drawn.contents)


def _check_finite(drawn: InputPool, outputs: list[torch.Tensor]) -> None:
    for result, output in zip(drawn.results, outputs, strict=True):
        if output.is_floating_point() and output.numel() and not _finite_numbers([output]):
            raise AtFault(f"no number of its reference's output {result.name} is finite")


def _finite_numbers(outputs: Outputs) -> int:
    return sum(int(output.double().isfinite().sum()) for output in outputs if output.is_floating_point())


def _notes(drawn: InputPool, outputs: list[torch.Tensor]) -> tuple[str, ...]:
    notes = []
    for result, output in zip(drawn.results, outputs, strict=True):
        if output.is_floating_point() and (share := 1 - float(output.double().isfinite().double().mean())) > 0:
            notes.append(f"{result.name}: {share:.1%} of the reference's numbers are inf or nan, and must be")
    if not drawn.varied:
        notes.append("its inputs are recorded indices alone, the same in each invocation: a remembered result passes")
    return tuple(notes)

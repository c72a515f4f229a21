"""Whether a Definition's reference is what the engine's operator computes: both run on the same rebuilt inputs.

Runs in a process of its own (kcap.bench.check.worker): a recorded operator may crash it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NotRequired, Required, TypedDict, cast

import torch

from kcap.bench.accuracy import RTOL, SAME, Choice, compare
from kcap.bench.accuracy.rounding import rounds_to
from kcap.bench.check.choices import ChoiceRecorder, RecordedChoice
from kcap.bench.check.draws import DrawAnswer, DrawRequest, try_draws
from kcap.replay.calls.runner import error_fields
from kcap.replay.datasets.reference import compile_reference
from kcap.replay.rebuild.rebuild import Rebuilder, ResolvedCall
from kcap.schemas.derive.bound_call import Inputs, Skip
from kcap.schemas.derive.invocation import Invocation, Unrecognized, argument_names, implied
from kcap.schemas.derive.kernel import CallUse, DerivedDefinition, KernelInstance
from kcap.schemas.recording.records import Call, Sample
from kcap.schemas.recording.values import Group

SEARCHED_PART = 1 << 20  # elements in which a number is looked for at a time


class CheckRequest(TypedDict):
    """What the worker is asked. `sample`: the Sample's JSON. `ranks`: of the group that a collective needs."""

    definition: str
    call: int
    sample: dict[str, Any] | None
    seed: int
    ranks: NotRequired[int]


class CheckAnswer(TypedDict, total=False):
    """What came of it. `error`: the greatest, in units of what is allowed; `poisoned`: the process can do no more."""

    status: Required[Literal["agrees", "differs", "skipped", "failed"]]
    reason: str
    error: float
    poisoned: bool


class Checker:
    """Checks the references of one Recording's Definitions on one device.

    `refused`: why a Call has no Definition here. Where an operator's library is loaded, torch knows what it returns,
    and a Call can turn out to have none. `rank`: of this process among those that check a collective together.
    """

    def __init__(
        self,
        kernels: list[DerivedDefinition],
        rebuilder: Rebuilder,
        refused: Mapping[int, str] | None = None,
        rank: int = 0,
    ) -> None:
        self.rank = rank
        self.kernels = {kernel.definition.name: kernel for kernel in kernels}
        self.refused = refused or {}
        self.rebuilder = rebuilder
        self.references: dict[str, Any] = {}

    def check(self, definition: str, call: int, sample: Sample | None, seed: int) -> CheckAnswer:
        kernel = self.kernels.get(definition)
        if kernel is None:
            return {"status": "failed", "reason": self._why_underived(call)}
        try:
            return self._check(kernel, next(use for use in kernel.uses if use.call.id == call), sample, seed)
        except Unrecognized as error:
            return {"status": "skipped", "reason": str(error)}
        except Exception as error:
            return cast(CheckAnswer, error_fields(error, self.rebuilder.target))

    def _why_underived(self, call: int) -> str:
        return f"where its library is loaded, {self.refused.get(call, 'it is derived otherwise')}"

    def try_draws(self, request: DrawRequest, sample: Sample | None) -> DrawAnswer:
        """Whether a Definition's reference can be compared on what another benchmark draws."""
        kernel = self.kernels.get(request["definition"])
        if kernel is None:
            return {"status": "refused", "reason": self._why_underived(request["call"])}
        use = next(use for use in kernel.uses if use.call.id == request["call"])
        device, recording = self.rebuilder.target.device, self.rebuilder.recording
        try:
            run = self._compiled(kernel)
            return try_draws(kernel.definition, run, use, sample, recording, request, device)
        except Unrecognized as error:
            return {"status": "skipped", "reason": str(error)}
        except Exception as error:
            return cast(DrawAnswer, error_fields(error, self.rebuilder.target))

    def _check(self, kernel: DerivedDefinition, use: CallUse, sample: Sample | None, seed: int) -> CheckAnswer:
        if use.call.group:
            torch.manual_seed(seed)
            resolved = self.rebuilder.resolve(use.call, sample)
            return self._check_together(kernel, use, resolved, use.call.group.size, seed)
        resolved, inputs, form = self._draw(use, sample, seed)
        if form.random:
            raise Skip("it draws numbers: two runs agree in distribution alone")
        with ChoiceRecorder() as recorder:
            expected = self._reference(kernel, [slot.get() for slot in form.inputs.values()])
        actual = run_operator(use, resolved, inputs, form)
        result = compare_outputs(form, actual, expected, recorder)
        if result["status"] == "differs" and (truth := self._truth(kernel, use, sample, seed, expected)):
            result = compare_outputs(form, actual, expected, recorder, truth)
        if result["status"] == "agrees" and not any(is_informative(ref) for ref in expected):
            raise Skip("its outputs have no number that could differ")
        return result

    def _draw(self, use: CallUse, sample: Sample | None, seed: int) -> tuple[ResolvedCall, Inputs, KernelInstance]:
        """The call on inputs of `seed`, and where the Definition's are among them."""
        torch.manual_seed(seed)
        resolved = self.rebuilder.resolve(use.call, sample)
        inputs = self.rebuilder.build(resolved)
        return resolved, inputs, use.bind(invocation_with_inputs(resolved, inputs, use.call))

    def _truth(
        self, kernel: DerivedDefinition, use: CallUse, sample: Sample | None, seed: int, own: list[Any]
    ) -> list[torch.Tensor] | None:
        """What the reference makes of the same inputs in float64, where but for rounding that is its `own`: a kernel
        need not round where the reference does, as fused ones do not. None where it does not run in float64.
        """
        _, _, form = self._draw(use, sample, seed)
        try:
            higher = self._reference(kernel, [in_float64(slot.get()) for slot in form.inputs.values()])
        except Exception:
            return None
        outputs, truth = [torch.as_tensor(each) for each in own], [in_float64(torch.as_tensor(each)) for each in higher]
        same = len(outputs) == len(truth) and rounds_to(kernel.definition, outputs, truth, {})
        return truth if same else None

    def _check_together(
        self, kernel: DerivedDefinition, use: CallUse, resolved: ResolvedCall, ranks: int, seed: int
    ) -> CheckAnswer:
        """Check a collective, whose Definition takes all ranks' tensors stacked: each rank draws those of all.

        The operator runs on this rank's own, together with the other processes. What is not stacked all ranks share.
        """
        inputs = []
        for rank in range(ranks):
            torch.manual_seed(seed + rank)
            inputs.append(self.rebuilder.build(resolved))
        forms = [use.bind(invocation_with_inputs(resolved, own, use.call, rank)) for rank, own in enumerate(inputs)]
        form, stacks = forms[self.rank], list[Any]()
        for name, slot in form.inputs.items():
            if slot.shape is None:
                stacks.append(slot.get())
            elif "world_size" in slot.shape:
                stacks.append(torch.stack([other.inputs[name].get()[rank] for rank, other in enumerate(forms)]))
            else:
                stacks.append(slot.get().copy_(forms[0].inputs[name].get()))
        expected = self._reference(kernel, stacks)
        return compare_outputs(form, run_operator(use, resolved, inputs[self.rank], form), expected)

    def _reference(self, kernel: DerivedDefinition, inputs: list[Any]) -> list[Any]:
        """What the reference makes of `inputs`, which it gets copies of."""
        return as_list(self._compiled(kernel)(*map(copy_of, inputs)))

    def _compiled(self, kernel: DerivedDefinition) -> Any:
        name = kernel.definition.name
        if name not in self.references:
            self.references[name] = compile_reference(kernel.definition.reference, name)
        return self.references[name]


def invocation_with_inputs(resolved: ResolvedCall, inputs: Inputs, call: Call, rank: int | None = None) -> Invocation:
    """The invocation with the arguments that the operator will get, but for its group; a Rule's hidden tensors by name.

    A family reads the size of the group and the rank in it (`rank`, where it is not the recorded one), which what
    stands for it here does not tell.
    """
    positional, args = iter(inputs.args), resolved.bound.args
    names = argument_names(call.model_copy(update={"args": args}))
    values = [inputs.kwargs[a.name] if a.keyword and a.name else next(positional) for a in args]
    groups = [arg.value if isinstance(arg.value, Group) else None for arg in args]
    values = [
        value if group is None else group if rank is None else replace(group, rank=rank)
        for group, value in zip(groups, values, strict=True)
    ]
    by_name = {name: value for kept in inputs.keep for name, value in vars(kept).items()}
    tensors = {name: value for name, value in by_name.items() if isinstance(value, torch.Tensor)}
    return Invocation(call.operator, implied(call) | dict(zip(names, values, strict=True)), tensors)


def run_operator(use: CallUse, resolved: ResolvedCall, inputs: Inputs, form: KernelInstance) -> list[Any]:
    """The Definition's outputs as the operator makes them."""
    invocation = invocation_with_inputs(resolved, inputs, use.call)
    invocation.result = resolved.operator.call(*inputs.args, **inputs.kwargs)
    return [slot.get() for slot in use.bind(invocation).outputs.values()]


def in_float64(value: Any) -> Any:
    """A tensor of a dtype that numbers are rounded to; anything else as it is."""
    return value.double() if isinstance(value, torch.Tensor) and value.dtype in RTOL else value


def copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def as_list(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def is_informative(output: Any) -> bool:
    """Whether an output tells something of what made it: an empty one does not, nor one of nan alone."""
    numbers = torch.as_tensor(output).reshape(-1)
    if numbers.dtype not in RTOL:
        return bool(numbers.numel())
    return any(not bool(part.double().isnan().all()) for part in numbers.split(SEARCHED_PART))


def compare_outputs(
    form: KernelInstance,
    actual: list[Any],
    expected: list[Any],
    recorder: ChoiceRecorder | None = None,
    truth: list[torch.Tensor] | None = None,
) -> CheckAnswer:
    """`recorder`: what the reference chose by scores. `truth`: without the rounding that `expected` has."""
    if len(expected) != len(form.outputs):
        return {"status": "failed", "reason": f"the reference returns {len(expected)} of {len(form.outputs)} outputs"}
    errors = {
        name: _error(torch.as_tensor(out), torch.as_tensor(ref), _recorded_choice(recorder, ref), wide)
        for name, out, ref, wide in zip(form.outputs, actual, expected, truth or [None] * len(expected), strict=True)
    }
    name, error = max(errors.items(), key=lambda item: item[1])
    if error <= SAME:
        return {"status": "agrees", "error": error}
    return {"status": "differs", "error": error, "reason": f"output {name} is off by {error:.3g} times what is allowed"}


def _recorded_choice(recorder: ChoiceRecorder | None, output: Any) -> RecordedChoice | None:
    return recorder.choice_of(output) if recorder and isinstance(output, torch.Tensor) else None


def _error(
    out: torch.Tensor, ref: torch.Tensor, chosen: RecordedChoice | None, truth: torch.Tensor | None = None
) -> float:
    """Where `out` is; on the CPU, if there is no memory for that."""

    def on(device: torch.device) -> float:
        scores = None if chosen is None else chosen.scores.to(device)
        choice = None if chosen is None or scores is None else Choice(scores, scores, chosen.ordered)
        return compare(out.to(device), ref.to(device), choice, None if truth is None else truth.to(device)).error

    try:
        return on(out.device)
    except torch.OutOfMemoryError:
        return on(torch.device("cpu"))

"""The Cost of a Call on one Sample: as its family counts it, else what an ATen operator moves for certain."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kcap.replay.bind import Bound
from kcap.replay.describe import described
from kcap.replay.rebuild import Decided
from kcap.replay.roofline import sweeps
from kcap.replay.skip import Skip
from kcap.schemas.dtypes import BY_NAME
from kcap.schemas.families import NEVER_TAKEN, form_of
from kcap.schemas.families.cost import Cost, of_form, reach
from kcap.schemas.families.generic_outputs import flatten
from kcap.schemas.records import Argument, Call
from kcap.schemas.values import TensorSpec, tensors
from kcap.schemas.work import does_work


def cost_of(call: Call, decided: Decided) -> Cost | None:
    """What one invocation must move and compute; None where nobody knows.

    `decided`: its every value. A Recording from elsewhere may hold any arguments: none of them is an error here.
    """
    if not does_work(call):
        return None
    try:
        form = form_of(described(decided.bound, call.launch))
        found = of_form(form).within(decided.total) if form else sweep(decided.bound, outs(decided))
    except (*NEVER_TAKEN, Skip):
        return None
    return found if found and (found.bytes or found.flops) else None


def outs(decided: Decided) -> frozenset[str]:
    """The arguments that it writes, by the operator's schema: a trace file does not tell."""
    declared = decided.operator.schema.arguments
    return frozenset(a.name for a in declared if a.alias_info is not None and a.alias_info.is_write)


def sweep(bound: Bound, writes: frozenset[str]) -> Cost | None:
    """The Cost of an operator that reads all of its inputs and writes all of its outputs; None for any other."""
    if bound.namespace != "aten" or not sweeps.sweeps(bound.operator):
        return None
    unread = sweeps.unread(bound.operator) | {name for name in writes if name != "self"}
    arguments = [(argument.name or "", argument) for argument in bound.args]
    read = _specs(argument for name, argument in arguments if name not in unread)
    written = _specs(argument for name, argument in arguments if name in writes)
    if sweeps.unread(bound.operator) and {spec.storage for spec in read} & {spec.storage for spec in written}:
        return None  # a tensor copied to itself is left alone
    total = _distinct(read) + (_distinct(written) if written else _returned(bound))
    return Cost(total, _distinct(read), 0, next((s.dtype for s in read if BY_NAME[s.dtype].kind == "float"), ""))


def _specs(arguments: Iterable[Argument]) -> list[TensorSpec]:
    return [spec for _, spec in tensors([argument.value for argument in arguments])]


def _distinct(specs: list[TensorSpec]) -> int:
    """Bytes of the elements of all tensors, where two with one storage count as the larger."""
    largest: dict[tuple[str, int], int] = {}
    for spec in specs:
        key = (spec.device, spec.storage)
        largest[key] = max(largest.get(key, 0), min(spec.numel, spec.extent) * spec.bits // 8)
    return sum(largest.values())


def _returned(bound: Bound) -> int:
    """Bytes of what the operator returns anew, as torch tells without data."""
    packet, _, overload = bound.operator.removeprefix("aten::").partition(".")
    run = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return sum(map(reach, flatten(run(**described(bound).arguments), several=True).values()))

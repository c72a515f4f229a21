"""The Cost of a Call on one Sample, and of a Definition on a Workload's inputs.

A Call's cost is counted by its family, else it is that of an ATen operator that certainly reads every element of its
inputs and writes every element of its outputs. A Definition's is by op_type, if that is known; inputs of which nothing
is known count as not read, and outputs as written completely.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kcap.replay.rebuild.rebuild import ResolvedCall
from kcap.replay.roofline.sweeps import sweeps_all, unread_inputs
from kcap.schemas.derive import families
from kcap.schemas.derive.bound_call import Inputs, invocation_of_bound
from kcap.schemas.derive.cost import Cost, CostInputs, cost_of_instance, distinct_bytes
from kcap.schemas.derive.families import REFUSALS, recognize
from kcap.schemas.derive.invocation import flatten
from kcap.schemas.flashinfer.definition import Definition
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.operators import does_work
from kcap.schemas.recording.records import Argument, Call
from kcap.schemas.recording.values import TensorSpec, storage_bytes, tensors
from kcap.schemas.results.measurement import LeastWork


def cost_of_call(call: Call, resolved: ResolvedCall, inputs: Inputs) -> Cost | None:
    """The bytes and FLOPs that one invocation on `inputs` needs; None where they are unknown.

    The operator is run once where only its results tell how much it writes: torch, asked without data, imports its
    compiler, for seconds. A Recording from elsewhere may hold any arguments: none of them is an error here.
    """
    if not does_work(call):
        return None
    try:
        instance = recognize(invocation_of_bound(resolved.bound, call.launch))
        cost = cost_of_instance(instance).within(resolved.input_bytes) if instance else sweep_cost(resolved, inputs)
    except REFUSALS:
        return None
    return cost if cost and (cost.bytes or cost.flops) else None


def written_arguments(resolved: ResolvedCall) -> frozenset[str]:
    """The arguments that it writes, by the operator's schema, since a trace file does not say."""
    declared = resolved.operator.schema.arguments
    return frozenset(a.name for a in declared if a.alias_info is not None and a.alias_info.is_write)


def sweep_cost(resolved: ResolvedCall, inputs: Inputs) -> Cost | None:
    """The Cost of an operator that reads all of its inputs and writes all of its outputs; None for any other."""
    bound, writes = resolved.bound, written_arguments(resolved)
    if bound.namespace != "aten" or not sweeps_all(bound.operator):
        return None
    unread = unread_inputs(bound.operator) | {name for name in writes if name != "self"}
    arguments = [(argument.name or "", argument) for argument in bound.args]
    read = _specs(argument for name, argument in arguments if name not in unread)
    written = _specs(argument for name, argument in arguments if name in writes)
    if unread_inputs(bound.operator) and {spec.storage for spec in read} & {spec.storage for spec in written}:
        return None  # a tensor copied to itself is left alone
    read_bytes = sum(storage_bytes(read))
    total = read_bytes + (sum(storage_bytes(written)) if written else _returned(resolved, inputs))
    return Cost(total, read_bytes, 0, next((s.dtype for s in read if BY_NAME[s.dtype].kind == "float"), ""))


def _specs(arguments: Iterable[Argument]) -> list[TensorSpec]:
    return [spec for _, spec in tensors([argument.value for argument in arguments])]


def _returned(resolved: ResolvedCall, inputs: Inputs) -> int:
    """Bytes of the operator's new results."""
    results = resolved.operator.call(*inputs.args, **inputs.kwargs)
    return sum(map(distinct_bytes, flatten(results).values()))


COPYING_OP_TYPES = frozenset("copy clone contiguous to to_copy fill zero".split())  # an input itself may be the answer


def cost_of_workload(definition: Definition, inputs: Mapping[str, Any]) -> Cost | None:
    """The bytes and FLOPs that one invocation on `inputs` (by name) needs; None where they are unknown."""
    cost_inputs = CostInputs(definition, inputs)
    try:
        cost = _cost_by_op_type(cost_inputs)
    except REFUSALS:  # another dataset's inputs of the same names
        cost = cost_inputs.unread()
    return cost if cost and (cost.bytes or cost.flops) and not cost_inputs.to_no_output else None


def _cost_by_op_type(cost_inputs: CostInputs) -> Cost | None:
    op_type = cost_inputs.definition.op_type
    if (cost_function := families.cost_function_for(op_type)) is not None:
        return cost_function(cost_inputs)
    if op_type in COPYING_OP_TYPES:
        return None
    return cost_inputs.whole() if sweeps_all(f"aten::{op_type}") else cost_inputs.unread()


def least_work(cost: Cost | None, stays: int) -> dict[str, Any] | None:
    """The field `work` of a Measurement; `stays`: bytes of inputs that do not rotate, which the cache may hold."""
    if cost is None:
        return None
    fresh = max(cost.read - stays, 0)
    return LeastWork(moved=cost.bytes, read=cost.read, fresh=fresh, flops=cost.flops, dtype=cost.dtype).model_dump()

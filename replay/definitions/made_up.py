"""A Workload for a Definition that comes without any: small sizes of its variable axes that meet its constraints."""

from __future__ import annotations

import math

from kcap.errors import KcapError
from kcap.replay.definitions import constraints
from kcap.schemas.definition import Definition
from kcap.schemas.workload import Input, RandomInput, ScalarInput, Workload

GROWTH = {"total_q": 2, "total_seq_len": 2, "num_kv_indices": 3, "total_kv": 3, "num_pages": 4, "state_cache_size": 2}
ONE = {"float32": 1.0, "float16": 1.0, "bfloat16": 1.0, "bool": False}
SOFTMAX_SCALES = frozenset({"sm_scale", "softmax_scale", "scale"})


def made_up(definition: Definition, size: int = 3) -> Workload:
    """A Workload of about `size` (at least 2) rows or sequences, all tensors random; KcapError if no sizes are found.

    Totals, pages and states are a few times as many. Scalars: 1 / sqrt(the queries' last axis) for a softmax scale, no
    offset, else one.
    """
    axes = _solve(definition, {axis: _start(axis, size) for axis in definition.var_axes})
    constraints.check(_of_axes(definition), {**axes, **definition.const_axes}, f"{definition.name} of {axes}")
    inputs: dict[str, Input] = {
        name: RandomInput() if tensor.shape is not None else ScalarInput(value=_scalar(definition, name, tensor.dtype))
        for name, tensor in definition.inputs.items()
    }
    return Workload(uuid="made-up", axes=axes, inputs=inputs)


def _start(axis: str, size: int) -> int:
    """The size before constraints speak; offsets are one more than what they divide."""
    return size + 1 if axis.startswith("len_") else size * GROWTH.get(axis, 1)


def _of_axes(definition: Definition) -> list[str]:
    return [text for text in definition.constraints if constraints.names(text) <= definition.axes.keys()]


def _solve(definition: Definition, axes: dict[str, int]) -> dict[str, int]:
    """`axes` with those that a constraint sets equal to an expression of others worked out, in the order stated."""
    for text in _of_axes(definition):
        match constraints.solved(text):
            case axis, other if axis in axes:
                value = constraints.evaluate(other, {**axes, **definition.const_axes})
                if not isinstance(value, int):
                    raise KcapError(f"{definition.name}: its constraint {text!r} gives {axis} no whole size")
                axes[axis] = value
    return axes


def _scalar(definition: Definition, name: str, dtype: str) -> float | int | bool:
    if name in SOFTMAX_SCALES:
        first = next(iter(definition.inputs.values())).shape or [""]
        return 1 / math.sqrt(definition.const_axes.get(first[-1], 1))
    return ONE.get(dtype, 0)

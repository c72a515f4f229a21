"""A Call whose values are decided, as a family reads it: without data but for its integer tensors' values."""

from __future__ import annotations

import torch

from kcap.replay.bind import Bound
from kcap.replay.skip import Skip
from kcap.schemas.families.invocation import Invocation, invocation_of, torch_dtype
from kcap.schemas.records import Call, Launch
from kcap.schemas.values import TensorSpec


def described(bound: Bound, launch: Launch | None = None) -> Invocation:
    """The invocation without data but for its integer tensors' values."""
    specs = dict(bound.integers())
    contents = {path: whole(values, specs[path]) for path, values in bound.contents.items() if path in specs}
    return invocation_of(Call(id=0, operator=bound.operator, args=bound.args, launch=launch), contents)


def whole(values: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """`values`, of which only the rows in use were kept, as `spec` has them: zeros in the rest."""
    values = values.to(torch_dtype(spec.dtype))
    if values.shape == spec.shape:
        return values
    if values.dim() != len(spec.shape) or any(n > m for n, m in zip(values.shape, spec.shape, strict=True)):
        raise Skip(f"the recorded values have shape {list(values.shape)}, the tensor {list(spec.shape)}")
    full = values.new_zeros(spec.shape)
    full[tuple(slice(n) for n in values.shape)] = values
    return full

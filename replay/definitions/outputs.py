"""What a reference or a Solution returned, held against the Definition: how many, of which shape and dtype, finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kcap.replay.definitions.draw import PACKED, torch_dtype
from kcap.schemas.definition import Definition
from kcap.schemas.records import Record


class Output(Record):
    """One output: its shape in elements, torch's dtype, and how many of its elements are not a number or infinite."""

    name: str
    shape: list[int]
    dtype: str
    nan: int = 0
    inf: int = 0


def outputs_of(definition: Definition, returned: Any) -> dict[str, torch.Tensor]:
    """The outputs by name, as FlashInfer-Bench takes them: one, several in order, or a dict; a number is a 0-D tensor.

    ValueError if there are too many or too few, or one is something else.
    """
    names = list(definition.outputs)
    if isinstance(returned, dict):
        given = {name: returned[name] for name in names if name in returned}
    else:
        listed = list(returned) if isinstance(returned, tuple | list) else [returned]
        if len(listed) != len(names):
            raise ValueError(f"returns {len(listed)} outputs, the Definition has {len(names)}")
        given = dict(zip(names, listed, strict=True))
    if missing := [name for name in names if name not in given]:
        raise ValueError(f"returns no {missing[0]}")
    return {name: _tensor(definition, name, value) for name, value in given.items()}


def check_output(definition: Definition, axes: Mapping[str, int], name: str, made: torch.Tensor) -> Output:
    """What `made` is; ValueError if its shape or dtype is not the output's where variable axes are as in `axes`."""
    tensor = definition.outputs[name]
    shape, dtype = definition.sizes(tensor.shape or (), axes), torch_dtype(tensor.dtype)
    if made.shape != shape:
        raise ValueError(f"{name}: has shape {list(made.shape)}, the Definition's is {list(shape)}")
    if made.dtype != dtype:
        raise ValueError(f"{name}: is {_word(made.dtype)}, the Definition's is {_word(dtype)}")
    return Output(name=name, shape=list(shape), dtype=_word(dtype), **_not_finite(made))


def _tensor(definition: Definition, name: str, value: Any) -> torch.Tensor:
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch_dtype(definition.outputs[name].dtype))
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: is a {type(value).__name__}, no tensor")
    return value


def _not_finite(made: torch.Tensor) -> dict[str, int]:
    if not made.is_floating_point() or _word(made.dtype) == PACKED["float4_e2m1"]:
        return {}
    real = made.float() if made.dtype.itemsize == 1 else made
    return {"nan": int(real.isnan().sum()), "inf": int(real.isinf().sum())}


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

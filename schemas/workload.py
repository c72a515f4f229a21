"""FlashInfer-Bench's Workload: the sizes of a Definition's variable axes, and where each input comes from.

Source: FlashInfer-Bench 0.1.2, `data/workload.py`. Its code takes an axis of size 0 (its document: positive), and so
does this reader. Its documents want a scalar input given as `scalar`; its code would draw a random one.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, FiniteFloat

from kcap.schemas.definition import Definition, DefinitionTensor
from kcap.schemas.strict import FileName, Size, StrictModel, Text


class RandomInput(StrictModel):
    """A tensor whose content does not matter: drawn when the Workload is run."""

    type: Literal["random"] = "random"


class ScalarInput(StrictModel):
    """A Python scalar."""

    type: Literal["scalar"] = "scalar"
    value: int | FiniteFloat | bool


class SafetensorsInput(StrictModel):
    """A tensor in a safetensors file; `path` is relative to the root of the dataset."""

    type: Literal["safetensors"] = "safetensors"
    path: Text
    tensor_key: Text


Input: TypeAlias = Annotated[RandomInput | ScalarInput | SafetensorsInput, Field(discriminator="type")]


class Workload(StrictModel):
    """One instance of a Definition. `axes`: elements; `uuid` is part of the name of its blob."""

    uuid: FileName
    axes: dict[str, Size]
    inputs: dict[str, Input]


def check_workload(definition: Definition, workload: Workload) -> list[str]:
    """What keeps `workload` from being an instance of `definition`: one reason for each, none if it is one."""
    given, named = workload.inputs, definition.inputs
    needed = [name for name, tensor in named.items() if not tensor.optional]
    return [
        *(f"axes: {axis} has no size" for axis in definition.var_axes if axis not in workload.axes),
        *(reason for axis, size in workload.axes.items() if (reason := _axis(definition, axis, size))),
        *(f"inputs: {name} is missing" for name in needed if name not in given),
        *(f"inputs.{name}: {definition.name} has no such input" for name in given if name not in named),
        *(reason for name in given if name in named and (reason := _input(name, named[name], given[name]))),
    ]


def _axis(definition: Definition, name: str, size: int) -> str | None:
    if name not in definition.axes:
        return f"axes.{name}: {definition.name} has no such axis"
    constant = definition.const_axes.get(name, size)
    return None if size == constant else f"axes.{name}: {size}, but it is {constant} in every Workload"


def _input(name: str, tensor: DefinitionTensor, given: Input) -> str | None:
    if not isinstance(given, ScalarInput):
        return f"inputs.{name}: a scalar is given by its value, not as {given.type}" if tensor.shape is None else None
    if tensor.shape is not None:
        return f"inputs.{name}: a tensor, but given as a scalar"
    if type(given.value) not in _types(tensor.dtype):
        return f"inputs.{name}: {given.value} is no {tensor.dtype}"
    return None


def _types(dtype: str) -> tuple[type, ...]:
    return (bool,) if dtype == "bool" else (int,) if dtype.startswith("int") else (int, float)

"""FlashInfer-Bench's Definition (what a kernel computes, with a reference in PyTorch) and Workload (an instance of it).

Source: FlashInfer-Bench 0.1.2, `data/definition.py`, and its document of the schema. Where they differ: `tags` and
`constraints` may be null by the document and not by the code, so null is read as an empty list and never written.
Both accept and drop unknown keys; here they are refused, except `optional` (an input that a Workload may leave out),
which the published dataset uses. A name that is no file name is refused: files are named by it.

Source of the Workload: FlashInfer-Bench 0.1.2, `data/workload.py`. Its code takes an axis of size 0 (its document:
positive), and so does this reader. Its documents want a scalar input given as `scalar`; its code would draw a random
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field, FiniteFloat, TypeAdapter, field_validator, model_validator

from kcap.schemas.files.jsonfile import dump_json, parse_json
from kcap.schemas.files.python_source import check_positional, function, parameters, parse
from kcap.schemas.files.strict_model import FileName, Size, StrictModel, Text, Texts, check_tensors

DType = Literal[
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float4_e2m1",
    "int64",
    "int32",
    "int16",
    "int8",
    "bool",
]

DTYPES: tuple[DType, ...] = get_args(DType)
VERIFIED, DRAFT = "status:verified", "status:draft"  # tags
IN_PLACE = "in_place:"  # a tag: in_place:INPUT=OUTPUT


class AxisConst(StrictModel):
    """An axis whose size is part of the kernel."""

    type: Literal["const"] = "const"
    value: Size
    description: str | None = None


class AxisVar(StrictModel):
    """An axis whose size each Workload gives."""

    type: Literal["var"] = "var"
    description: str | None = None


Axis: TypeAlias = Annotated[AxisConst | AxisVar, Field(discriminator="type")]


class DefinitionTensor(StrictModel):
    """An input or output: `shape` names its axes; [] is a 0-D tensor, None a Python scalar."""

    shape: list[Text] | None
    dtype: DType
    description: str | None = None
    optional: bool = False


class Definition(StrictModel):
    """A kernel: `reference` defines `run`, which takes the inputs by position, in order, and returns the outputs."""

    name: FileName
    op_type: FileName
    axes: dict[Text, Axis]
    inputs: dict[Text, DefinitionTensor]
    outputs: dict[Text, DefinitionTensor]
    reference: Text
    tags: Texts = []
    description: str | None = None
    constraints: Texts = []

    @field_validator("constraints")
    @classmethod
    def _constraints_are_expressions(cls, constraints: list[str]) -> list[str]:
        for constraint in constraints:
            parse(constraint.strip(), "eval")
        return constraints

    @model_validator(mode="after")
    def _run_takes_the_inputs(self) -> Definition:
        try:
            check_positional(function(self.reference, "run"), len(self.inputs))
        except ValueError as error:
            raise ValueError(f"reference: {error}") from None
        return self

    @model_validator(mode="after")
    def _names_are_declared_once(self) -> Definition:
        check_tensors(self.axes, self.inputs, self.outputs)
        return self

    @cached_property
    def const_axes(self) -> dict[str, int]:
        """The sizes of the constant axes."""
        return {name: axis.value for name, axis in self.axes.items() if isinstance(axis, AxisConst)}

    @cached_property
    def var_axes(self) -> list[str]:
        """The names of the variable axes."""
        return [name for name, axis in self.axes.items() if isinstance(axis, AxisVar)]

    @cached_property
    def written_inputs(self) -> dict[str, str]:
        """The inputs that a kernel may write in place; of each, the output that is then there.

        FlashInfer-Bench has no form for it. Here a tag says so, `in_place:INPUT=OUTPUT`; of a Definition without one,
        the names do, as in its published dataset: `new_X` or `X_out` is what X becomes. Shape and dtype are the same.
        """
        said = [tag.removeprefix(IN_PLACE).partition("=")[::2] for tag in self.tags if tag.startswith(IN_PLACE)]
        named = [(name, output) for name in self.inputs for output in (f"{name}_out", f"new_{name}")]
        return {
            name: output
            for name, output in said or named
            if name in self.inputs and output in self.outputs and self._are_alike(name, output)
        }

    def _are_alike(self, name: str, output: str) -> bool:
        ours, theirs = self.inputs[name], self.outputs[output]
        return ours.shape is not None and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)

    def sizes(self, shape: Sequence[str], axes: Mapping[str, int]) -> tuple[int, ...]:
        """`shape` in elements, its variable axes as `axes` has them; ValueError names the axis that has no size."""
        sizes = {**axes, **self.const_axes}
        if missing := [axis for axis in shape if axis not in sizes]:
            raise ValueError(f"axis {missing[0]} of {self.name} has no size")
        return tuple(sizes[axis] for axis in shape)


ADAPTER = TypeAdapter(Definition)


def check_definition(definition: Definition) -> list[str]:
    """What FlashInfer-Bench reads but cannot run as meant: one reason for each.

    It calls `run` by position, and binds the variable axes to the shapes of the inputs.
    """
    reasons = []
    names = parameters(function(definition.reference, "run"))[: len(definition.inputs)]
    if names != list(definition.inputs)[: len(names)]:  # *args may take the others
        reasons.append(f"reference: run takes {', '.join(names)}; the inputs are {', '.join(definition.inputs)}")
    bound = {axis for tensor in definition.inputs.values() for axis in tensor.shape or ()}
    unbound = [axis for axis in definition.var_axes if axis not in bound]
    return reasons + [f"axes.{axis}: variable, but no input has it" for axis in unbound]


def from_bytes(content: bytes, place: str = "Definition") -> Definition:
    """The Definition in `content`; FormatError names what is wrong in `place`."""
    return parse_json(content, ADAPTER, place)


def to_bytes(definition: Definition) -> bytes:
    """The JSON document of `definition`, indented."""
    return dump_json(definition.model_dump(mode="json"))


def read(path: Path) -> Definition:
    """The Definition in `path`; FormatError if it has a field too many, too few or of the wrong kind."""
    return from_bytes(path.read_bytes(), str(path))


def write(path: Path, definition: Definition) -> None:
    """Write `definition`."""
    path.write_bytes(to_bytes(definition))


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


WorkloadInput: TypeAlias = Annotated[RandomInput | ScalarInput | SafetensorsInput, Field(discriminator="type")]


class Workload(StrictModel):
    """One instance of a Definition. `axes`: elements; `uuid` is part of the name of its blob."""

    uuid: FileName
    axes: dict[str, Size]
    inputs: dict[str, WorkloadInput]


def check_workload(definition: Definition, workload: Workload) -> list[str]:
    """What keeps `workload` from being an instance of `definition`: one reason for each, none if it is one."""
    inputs, declared = workload.inputs, definition.inputs
    needed = [name for name, tensor in declared.items() if not tensor.optional]
    return [
        *(f"axes: {axis} has no size" for axis in definition.var_axes if axis not in workload.axes),
        *(reason for axis, size in workload.axes.items() if (reason := _check_axis(definition, axis, size))),
        *(f"inputs: {name} is missing" for name in needed if name not in inputs),
        *(f"inputs.{name}: {definition.name} has no such input" for name in inputs if name not in declared),
        *(
            reason
            for name in inputs
            if name in declared and (reason := _check_input(name, declared[name], inputs[name]))
        ),
    ]


def _check_axis(definition: Definition, name: str, size: int) -> str | None:
    if name not in definition.axes:
        return f"axes.{name}: {definition.name} has no such axis"
    constant = definition.const_axes.get(name, size)
    return None if size == constant else f"axes.{name}: {size}, but it is {constant} in every Workload"


def _check_input(name: str, tensor: DefinitionTensor, value: WorkloadInput) -> str | None:
    if not isinstance(value, ScalarInput):
        return f"inputs.{name}: a scalar is given by its value, not as {value.type}" if tensor.shape is None else None
    if tensor.shape is not None:
        return f"inputs.{name}: a tensor, but given as a scalar"
    if type(value.value) not in _types(tensor.dtype):
        return f"inputs.{name}: {value.value} is no {tensor.dtype}"
    return None


def _types(dtype: str) -> tuple[type, ...]:
    return (bool,) if dtype == "bool" else (int,) if dtype.startswith("int") else (int, float)

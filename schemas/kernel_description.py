"""The FlashInfer schema set's Kernel Description: the older form of what is now a Definition.

Source: the FlashInfer schema set. Its table calls the keys `id` and `reference_code`, most of its examples `name` and
`code`: both are read, the table's are written. `assumptions` is in an example only, as a set of strings, which JSON
does not have: a list here. The code defines `run(*inputs, *outputs)`, which writes into the outputs and returns
nothing; the set's own examples leave it out ("..."), so that is read, but nothing can be run then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import Field, TypeAdapter, field_validator, model_validator

from kcap.schemas.jsonfile import dump_json, parse_json
from kcap.schemas.python_source import check_positional, function, parse
from kcap.schemas.strict import Size, StrictModel, Text, Texts, check_tensors

DType = Literal["float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2", "float4_e2m1", "int8", "bool"]
DTYPES: tuple[DType, ...] = get_args(DType)
OTHER_NAMES = {"name": "id", "code": "reference_code"}


class AxisConst(StrictModel):
    """An axis whose size is part of the kernel."""

    type: Literal["const"] = "const"
    value: Size


class AxisVar(StrictModel):
    """An axis whose size the input data give; `parent` is the axis that it is nested in (a group's rows)."""

    type: Literal["var"] = "var"
    parent: str | None = None


Axis: TypeAlias = Annotated[AxisConst | AxisVar, Field(discriminator="type")]


class DescribedTensor(StrictModel):
    """An input or output: `shape` names its axes; [] is a scalar, given as a number or as a 0-D tensor."""

    shape: list[Text]
    dtype: DType = "float16"


class KernelDescription(StrictModel):
    """A kernel of the older set."""

    id: Text
    axes: dict[Text, Axis]
    assumptions: Texts = []
    inputs: dict[Text, DescribedTensor]
    outputs: dict[Text, DescribedTensor]
    reference_code: Text

    @model_validator(mode="before")
    @classmethod
    def _under_the_names_of_the_table(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for other, key in OTHER_NAMES.items():
            if other in data and key in data:
                raise ValueError(f"{key} and {other} are one field: give {key}")
        return {OTHER_NAMES.get(key, key): value for key, value in data.items()}

    @field_validator("reference_code")
    @classmethod
    def _code_is_python(cls, code: str) -> str:
        parse(code)
        return code

    @field_validator("assumptions")
    @classmethod
    def _assumptions_are_expressions(cls, assumptions: list[str]) -> list[str]:
        for assumption in assumptions:
            parse(assumption.strip(), "eval")
        return assumptions

    @model_validator(mode="after")
    def _axes_are_declared(self) -> KernelDescription:
        check_tensors(self.axes, self.inputs, self.outputs)
        for name, axis in self.axes.items():
            if isinstance(axis, AxisVar) and axis.parent is not None and axis.parent not in self.axes:
                raise ValueError(f"axes.{name}: its parent {axis.parent} is not among axes")
        return self


ADAPTER = TypeAdapter(KernelDescription)


def check_kernel_description(description: KernelDescription) -> list[str]:
    """What keeps the code of `description` from being run: one reason, or none."""
    try:
        run = function(description.reference_code, "run")
        check_positional(run, len(description.inputs) + len(description.outputs))
    except ValueError as error:
        return [f"reference_code: {error}"]
    return []


def from_bytes(content: bytes, place: str = "Kernel Description") -> KernelDescription:
    """The Kernel Description in `content`; FormatError names what is wrong in `place`."""
    return parse_json(content, ADAPTER, place)


def to_bytes(description: KernelDescription) -> bytes:
    """The JSON document of `description`, indented, with the keys of the set's table."""
    return dump_json(description.model_dump(mode="json"))


def read(path: Path) -> KernelDescription:
    """The Kernel Description in `path`; FormatError if it has a field too many, too few or of the wrong kind."""
    return from_bytes(path.read_bytes(), str(path))


def write(path: Path, description: KernelDescription) -> None:
    """Write `description`."""
    path.write_bytes(to_bytes(description))

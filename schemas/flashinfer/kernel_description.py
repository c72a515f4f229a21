"""The FlashInfer schema set's Kernel Description, the older form of a Definition, and the conversion between the two.

Source: the FlashInfer schema set. Its table calls the keys `id` and `reference_code`, most of its examples `name` and
`code`: both are read, the table's are written. `assumptions` is in an example only, as a set of strings, which JSON
does not have: a list here. The code defines `run(*inputs, *outputs)`, which writes into the outputs and returns
nothing; the set's own examples leave it out ("..."), so that is read, but nothing can be run then.

A Kernel Description's `run` writes into outputs that it is given last; a Definition's returns them.
"""

from __future__ import annotations

from collections.abc import Iterable
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from kcap.errors import FormatError
from kcap.schemas.files.jsonfile import dump_json, parse_json, reasons
from kcap.schemas.files.python_source import check_positional, function, parse
from kcap.schemas.files.strict_model import Size, StrictModel, Text, Texts, check_tensors
from kcap.schemas.flashinfer.definition import Definition, DefinitionTensor
from kcap.schemas.recording.dtypes import TORCH_NAMES

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


RESERVED = ("torch", "run", "run_into", "run_returning", "results")  # names that the function needs


def as_returning_function(description: KernelDescription) -> str:
    """The code of `description`, and a `run` that allocates the outputs, calls it and returns them."""
    inputs, outputs = list(description.inputs), list(description.outputs)
    results = [f"{name}.item()" if not description.outputs[name].shape else name for name in outputs]
    return _wrapped(description.id, description.reference_code, "run_into", inputs, outputs) + "".join(
        [
            f"def run({', '.join(inputs)}):\n",
            *(f"    {name} = {_allocated(description, name)}\n" for name in outputs),
            f"    run_into({', '.join(inputs + outputs)})\n",
            f"    return {', '.join(results)}\n",
        ]
    )


def as_writing_function(definition: Definition) -> str:
    """The reference of `definition`, and a `run` that writes what it returns into the outputs."""
    inputs, outputs = list(definition.inputs), list(definition.outputs)
    copies = [
        f"    {name}.{'copy_' if definition.outputs[name].shape else 'fill_'}(results[{index}])\n"
        for index, name in enumerate(outputs)
    ]
    return _wrapped(definition.name, definition.reference, "run_returning", inputs, outputs) + "".join(
        [
            f"def run({', '.join(inputs + outputs)}):\n",
            f"    results = run_returning({', '.join(inputs)})\n",
            "    results = results if isinstance(results, (tuple, list)) else (results,)\n",
            *copies,
        ]
    )


def _wrapped(place: str, code: str, inner: str, inputs: Iterable[str], outputs: Iterable[str]) -> str:
    """`code` with its `run` known as `inner`; FormatError if a tensor's name cannot be a parameter's."""
    for name in (*inputs, *outputs):
        if not name.isidentifier() or iskeyword(name) or name in RESERVED:
            raise FormatError(
                place, f"{name}: rename it, since it cannot be a parameter of the function that calls run"
            )
    return f"{code}\n\n\nimport torch\n\n{inner} = run\n\n\n"


def _allocated(description: KernelDescription, name: str) -> str:
    """The Python expression that allocates the output `name`, where the first input is."""
    output = description.outputs[name]
    sizes = [_size(description, name, axis) for axis in output.shape]
    device = next(
        (f", device={input_name}.device" for input_name, tensor in description.inputs.items() if tensor.shape), ""
    )
    dtype = TORCH_NAMES.get(output.dtype, output.dtype)
    return f"torch.empty([{', '.join(sizes)}], dtype=torch.{dtype}{device})"


def _size(description: KernelDescription, output: str, axis: str) -> str:
    axis_kind = description.axes[axis]
    if isinstance(axis_kind, AxisConst):
        return str(axis_kind.value)
    for name, tensor in description.inputs.items():
        if axis in tensor.shape:
            return f"{name}.shape[{tensor.shape.index(axis)}]"
    raise FormatError(description.id, f"outputs.{output}: no input has its axis {axis}, so it cannot be allocated")


NEWER_DTYPES = {"float8_e4m3": "float8_e4m3fn"}
OLDER_DTYPES = {newer: name for name, newer in NEWER_DTYPES.items()}


def to_definition(description: KernelDescription, op_type: str) -> Definition:
    """`description` as a Definition of the type `op_type`; FormatError if its code cannot be called, or is not named.

    A scalar (shape []) becomes a Python scalar. An axis's parent is kept in the axis's description.
    """
    for reason in check_kernel_description(description):
        raise FormatError(description.id, reason)
    document = {
        "name": description.id,
        "op_type": op_type,
        "axes": {name: _newer_axis(axis) for name, axis in description.axes.items()},
        "constraints": description.assumptions,
        "inputs": {name: _newer_tensor(tensor) for name, tensor in description.inputs.items()},
        "outputs": {name: _newer_tensor(tensor) for name, tensor in description.outputs.items()},
        "reference": as_returning_function(description),
    }
    try:
        return Definition.model_validate(document)
    except ValidationError as error:
        raise FormatError(description.id, reasons(error, document)[0]) from None


def from_definition(definition: Definition) -> tuple[KernelDescription, list[str]]:
    """`definition` as a Kernel Description, and what that leaves out; FormatError for a dtype that the set lacks."""
    tensors = definition.inputs | definition.outputs
    for name, tensor in tensors.items():
        if OLDER_DTYPES.get(tensor.dtype, tensor.dtype) not in DTYPES:
            reason = f"{name}: a Kernel Description has no {tensor.dtype}; keep it as a Definition"
            raise FormatError(definition.name, reason)
    document = {
        "id": definition.name,
        "axes": {name: axis.model_dump(exclude={"description"}) for name, axis in definition.axes.items()},
        "assumptions": definition.constraints,
        "inputs": {name: _older_tensor(tensor) for name, tensor in definition.inputs.items()},
        "outputs": {name: _older_tensor(tensor) for name, tensor in definition.outputs.items()},
        "reference_code": as_writing_function(definition),
    }
    return KernelDescription.model_validate(document), _left_out(definition)


def _newer_axis(axis: Axis) -> dict[str, object]:
    if isinstance(axis, AxisConst):
        return {"type": "const", "value": axis.value}
    return {"type": "var", **({"description": f"nested in {axis.parent}"} if axis.parent else {})}


def _newer_tensor(tensor: DescribedTensor) -> dict[str, object]:
    return {"shape": tensor.shape or None, "dtype": NEWER_DTYPES.get(tensor.dtype, tensor.dtype)}


def _older_tensor(tensor: DefinitionTensor) -> dict[str, object]:
    return {"shape": tensor.shape or [], "dtype": OLDER_DTYPES.get(tensor.dtype, tensor.dtype)}


def _left_out(definition: Definition) -> list[str]:
    """The keys of `definition` that a Kernel Description has none for."""
    kinds = {"inputs": definition.inputs, "outputs": definition.outputs}
    described = [
        *(f"axes.{name}.description" for name, axis in definition.axes.items() if axis.description),
        *(
            f"{kind}.{name}.description"
            for kind, tensors_of_kind in kinds.items()
            for name, tensor in tensors_of_kind.items()
            if tensor.description
        ),
        *(f"inputs.{name}.optional" for name, tensor in definition.inputs.items() if tensor.optional),
        *(f"outputs.{name}: 0-D, now a scalar" for name, tensor in definition.outputs.items() if tensor.shape == []),
    ]
    return ["op_type", *(key for key in ("tags", "description") if getattr(definition, key)), *described]

"""Between the older Kernel Description and the Definition."""

from __future__ import annotations

from pydantic import ValidationError

from kcap.errors import FormatError
from kcap.schemas import kernel_description as older
from kcap.schemas.definition import Definition, DefinitionTensor
from kcap.schemas.jsonfile import reasons
from kcap.schemas.kernel_code import returning, writing
from kcap.schemas.kernel_description import DescribedTensor, KernelDescription, check_kernel_description

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
        "reference": returning(description),
    }
    try:
        return Definition.model_validate(document)
    except ValidationError as error:
        raise FormatError(description.id, reasons(error, document)[0]) from None


def from_definition(definition: Definition) -> tuple[KernelDescription, list[str]]:
    """`definition` as a Kernel Description, and what that leaves out; FormatError for a dtype that the set lacks."""
    tensors = definition.inputs | definition.outputs
    for name, tensor in tensors.items():
        if OLDER_DTYPES.get(tensor.dtype, tensor.dtype) not in older.DTYPES:
            reason = f"{name}: a Kernel Description has no {tensor.dtype}; keep it as a Definition"
            raise FormatError(definition.name, reason)
    document = {
        "id": definition.name,
        "axes": {name: axis.model_dump(exclude={"description"}) for name, axis in definition.axes.items()},
        "assumptions": definition.constraints,
        "inputs": {name: _older_tensor(tensor) for name, tensor in definition.inputs.items()},
        "outputs": {name: _older_tensor(tensor) for name, tensor in definition.outputs.items()},
        "reference_code": writing(definition),
    }
    return KernelDescription.model_validate(document), _left_out(definition)


def _newer_axis(axis: older.Axis) -> dict[str, object]:
    if isinstance(axis, older.AxisConst):
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
            for kind, all_ in kinds.items()
            for name, one in all_.items()
            if one.description
        ),
        *(f"inputs.{name}.optional" for name, tensor in definition.inputs.items() if tensor.optional),
        *(f"outputs.{name}: 0-D, now a scalar" for name, one in definition.outputs.items() if one.shape == []),
    ]
    return ["op_type", *(key for key in ("tags", "description") if getattr(definition, key)), *described]

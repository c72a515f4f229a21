"""Between the older Kernel Description and the Definition; the code is wrapped, since they call `run` differently.

A Kernel Description's `run` writes into outputs that it is given last; a Definition's returns them.
"""

from __future__ import annotations

from collections.abc import Iterable
from keyword import iskeyword

from pydantic import ValidationError

from kcap.errors import FormatError
from kcap.schemas import kernel_description as older
from kcap.schemas.definition import Definition, DefinitionTensor
from kcap.schemas.jsonfile import reasons
from kcap.schemas.kernel_description import DescribedTensor, KernelDescription, check_kernel_description

NEWER_DTYPES = {"float8_e4m3": "float8_e4m3fn"}
OLDER_DTYPES = {newer: name for name, newer in NEWER_DTYPES.items()}
TORCH_DTYPES = {**NEWER_DTYPES, "float4_e2m1": "float4_e2m1fn_x2"}
RESERVED = ("torch", "run", "run_into", "run_returning", "results")  # names that the wrappers need


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
        "reference": _returning(description),
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
        "reference_code": _writing(definition),
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


def _returning(description: KernelDescription) -> str:
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


def _writing(definition: Definition) -> str:
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
    device = next((f", device={given}.device" for given, tensor in description.inputs.items() if tensor.shape), "")
    dtype = TORCH_DTYPES.get(output.dtype, output.dtype)
    return f"torch.empty([{', '.join(sizes)}], dtype=torch.{dtype}{device})"


def _size(description: KernelDescription, output: str, axis: str) -> str:
    known = description.axes[axis]
    if isinstance(known, older.AxisConst):
        return str(known.value)
    for name, tensor in description.inputs.items():
        if axis in tensor.shape:
            return f"{name}.shape[{tensor.shape.index(axis)}]"
    raise FormatError(description.id, f"outputs.{output}: no input has its axis {axis}, so it cannot be allocated")

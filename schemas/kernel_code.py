"""The code of a Kernel Description made a Definition's reference, and the other way: a function around it.

A Kernel Description's `run` writes into outputs that it is given last; a Definition's returns them.
"""

from __future__ import annotations

from collections.abc import Iterable
from keyword import iskeyword

from kcap.errors import FormatError
from kcap.schemas.definition import Definition
from kcap.schemas.kernel_description import AxisConst, KernelDescription

TORCH_DTYPES = {"float8_e4m3": "float8_e4m3fn", "float4_e2m1": "float4_e2m1fn_x2"}
RESERVED = ("torch", "run", "run_into", "run_returning", "results")  # names that the function needs


def returning(description: KernelDescription) -> str:
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


def writing(definition: Definition) -> str:
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
    if isinstance(known, AxisConst):
        return str(known.value)
    for name, tensor in description.inputs.items():
        if axis in tensor.shape:
            return f"{name}.shape[{tensor.shape.index(axis)}]"
    raise FormatError(description.id, f"outputs.{output}: no input has its axis {axis}, so it cannot be allocated")

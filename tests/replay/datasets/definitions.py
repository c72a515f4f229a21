"""Definitions and datasets that several tests are about."""

from __future__ import annotations

from pathlib import Path

from kcap.schemas.flashinfer.definition import (
    AxisConst,
    AxisVar,
    Definition,
    DefinitionTensor,
    RandomInput,
    SafetensorsInput,
    ScalarInput,
    Workload,
)

DATASET = Path(__file__).parents[2] / "data" / "flashinfer-trace"
VAR, RANDOM = AxisVar(), RandomInput()
COPY = "import torch\n\n\ndef run(x):\n    return x.clone()\n"


def tensor(dtype: str, *shape: str, description: str | None = None) -> DefinitionTensor:
    return DefinitionTensor(shape=list(shape), dtype=dtype, description=description)


def definition(inputs, axes, *, op_type="test", constraints=(), reference=None, outputs=None) -> Definition:
    """A Definition whose reference, unless given, returns its first input."""
    named = {name: AxisVar() if size is None else AxisConst(value=size) for name, size in axes.items()}
    first = next(iter(inputs.values()))
    run = reference or f"def run({', '.join(inputs)}):\n    return {next(iter(inputs))}\n"
    made = outputs or {"out": first}
    return Definition(
        name="some_kernel",
        op_type=op_type,
        axes=named,
        inputs=inputs,
        outputs=made,
        reference=run,
        constraints=list(constraints),
    )


def workload(of: Definition, stored=None, scalars=None, **axes: int) -> Workload:
    """All inputs random, but for the scalars and those that are stored: a path by name."""
    given = dict.fromkeys(of.inputs, RANDOM)
    given |= {name: ScalarInput(value=value) for name, value in (scalars or {}).items()}
    given |= {name: SafetensorsInput(path=path, tensor_key=name) for name, path in (stored or {}).items()}
    return Workload(uuid="one", axes=axes, inputs=given)


def copying(reference: str) -> Definition:
    """A Definition of one input and one output, [4] of float32, with this reference."""
    x = tensor("float32", "N")
    return definition({"x": x}, {"N": 4}, reference=reference, outputs={"out": x})


PAGED = definition(
    {
        "q": tensor("float32", "T", "D"),
        "indptr": tensor("int32", "L"),
        "kv_indices": tensor("int32", "N"),
        "cache": tensor("float32", "num_pages", "D"),
    },
    {"T": None, "L": None, "N": None, "num_pages": None, "D": 32},
)

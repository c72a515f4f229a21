"""Small datasets for the targets that take Definitions."""

from __future__ import annotations

from kcap.schemas.flashinfer.dataset import WorkloadCount, blob_path, write_dataset
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
from kcap.schemas.recording.records import Count

RUN = "import torch\n\n\ndef run({}):\n    return {}\n"


def of(shape, dtype="float32", **more):
    return DefinitionTensor(shape=None if shape is None else shape.split(), dtype=dtype, **more)


def definition(name, inputs, outputs, body, **more):
    return Definition(
        name=name,
        op_type=more.pop("op_type", "test"),
        axes={"m": AxisVar(), "n": AxisConst(value=4)},
        inputs=inputs,
        outputs=outputs,
        reference=more.pop("reference", RUN.format(", ".join(inputs), body)),
        **more,
    )


SCALE = definition("scale", {"x": of("m n"), "eps": of(None)}, {"y": of("m n")}, "x * eps")
LOOKUP = definition(
    "lookup",
    {"table": of("m n", "bfloat16"), "rows": of("m", "int32")},
    {"y": of("m n", "bfloat16")},
    "table[rows.long()]",
)
MASKED = definition(
    "masked", {"x": of("m n"), "keep": of("m n", "bool")}, {"y": of("m n")}, "torch.where(keep, x, 0)", tags=["fused"]
)
TWO = definition("two", {"x": of("m n")}, {"y": of("m n"), "z": of("m n")}, "(x, x + 1)")
FP8 = definition("fp8", {"x": of("m n", "float8_e4m3fn")}, {"y": of("m n")}, "x.float()")


def workload(of_definition, uuid, m=2, **given):
    inputs = {name: given.get(name, RandomInput()) for name in of_definition.inputs}
    return Workload(uuid=uuid, axes={"m": m}, inputs=inputs)


def stored(of_definition, uuid, key):
    return SafetensorsInput(path=f"./{blob_path(of_definition, uuid)}", tensor_key=key)


def counted(of_definition, uuid, count, call, samples=1):
    return WorkloadCount(
        definition=of_definition.name,
        workload=uuid,
        operator=f"x::{of_definition.name}",
        call=call,
        samples=samples,
        counts=[Count(phase="decode", count=count)],
    )


def write_small(root):
    """`scale` in two sizes, `lookup` with recorded rows and two Samples, and one of each that a target refuses."""
    import torch

    eps = ScalarInput(value=0.5)
    looked = [workload(LOOKUP, uuid, rows=stored(LOOKUP, uuid, "rows")) for uuid in ("l1", "l2")]
    workloads = {
        "scale": [workload(SCALE, "s1", eps=eps), workload(SCALE, "s2", m=3, eps=eps)],
        "lookup": looked,
        "masked": [workload(MASKED, "k1")],
        "two": [workload(TWO, "t1")],
        "fp8": [workload(FP8, "f1")],
    }
    blobs = {
        "l1": {"rows": torch.tensor([1, 0], dtype=torch.int32)},
        "l2": {"rows": torch.tensor([0, 0], dtype=torch.int32)},
    }
    counts = [
        counted(SCALE, "s1", 10, 0),
        counted(SCALE, "s2", 30, 1),
        counted(LOOKUP, "l1", 20, 2, samples=2),
        counted(LOOKUP, "l2", 20, 2, samples=2),
        counted(MASKED, "k1", 5, 3),
        counted(TWO, "t1", 7, 4),
        counted(FP8, "f1", 8, 5),
    ]
    write_dataset(root, [SCALE, LOOKUP, MASKED, TWO, FP8], workloads, blobs, counts)
    return root

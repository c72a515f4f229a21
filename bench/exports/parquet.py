"""`parquet`: every Call as a flat table for DuckDB, Polars, pandas and the Hugging Face hub.

One row is one Count of one Call: a Call that ran in two phases on two ranks has four rows, so that `sum(count)` is
right under any grouping. Regions, views and allocations are there: `where role = 'kernel'` leaves them out.
bench/README.md has a query in DuckDB and in Polars. Of a region that has a Definition the kernels inside have none.

`recording.json` is whole in the file's metadata, under the key `kcap`. Without torch, which families need, there are no
Definitions, families and outputs, and `bytes` is by the sizes of the tensors.
"""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from kcap.bench.contents import Contents
from kcap.bench.exports import Exporter, ExportRequest, exporter
from kcap.schemas.backendbench.convert import SHAPES
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Call, Metadata, Sample
from kcap.schemas.recording.signature import call_key, signature
from kcap.schemas.results.export_loss import ExportLoss, LossLedger
from kcap.show.estimate import bytes_and_flops, moved_bytes

if TYPE_CHECKING:
    import pyarrow

    from kcap.schemas.derive.kernel import CallUse, DerivedDefinition

ROW_GROUP = 65_536
CHUNK = 4096  # rows that are Python objects at a time
NOT_FLAT = "the order of calls, steps, Samples and kernel sources are not in a table of Calls"


@exporter("parquet")
class FlatCalls(Exporter):
    """calls.parquet."""

    def write(self, request: ExportRequest) -> ExportLoss:
        contents, ledger = request.contents, LossLedger()
        write_calls(request.output / "calls.parquet", contents.calls, contents.metadata, _derived_facts(contents))
        if contents.recording is not None:
            for call in contents.kernels:
                ledger.reduce(call.operator, NOT_FLAT, call.total)
                if call.shapes > 1:
                    ledger.reduce(call.operator, SHAPES, call.total)
        return ledger.loss("parquet", contents.total)

    def following(self, output: Path) -> str:
        table = f'read_table({dumps(str(output / "calls.parquet"))}, filters=[("role", "==", "kernel")])'
        counts = 'group_by("operator").aggregate([("count", "sum")]).sort_by([("count_sum", "descending")])'
        program = f'from pyarrow.parquet import read_table; print(*{table}.{counts}.to_pylist(), sep="\\n")'
        return shlex.join(["python", "-c", program])


@dataclass(frozen=True)
class DerivedFacts:
    """What families say of one Call. `bytes`: that one invocation touches at least; outputs None: not known."""

    bytes: int
    flops: int = 0
    definition: str | None = None
    family: str | None = None
    output_shapes: list[list[int]] | None = None
    output_dtypes: list[str] | None = None


def _derived_facts(contents: Contents) -> dict[int, DerivedFacts]:
    """By Call; empty without torch, and for a trace file, whose Calls have no Samples."""
    if contents.recording is None or importlib.util.find_spec("torch") is None:
        return {}
    from kcap.schemas.derive.derive import derive_calls

    samples = contents.recording.sample_by_call
    derived = derive_calls(contents.calls, contents.metadata, contents.recording)
    uses = {use.call.id: (kernel, use) for kernel in derived.kernels for use in kernel.uses}
    facts = {}
    for call in contents.calls:
        moved, flops = bytes_and_flops(call, samples.get(call.id), contents.recording)
        facts[call.id] = DerivedFacts(moved, flops)
        if call.id in uses:
            kernel, use = uses[call.id]
            shapes, dtypes = _outputs(kernel, use, samples.get(call.id), contents.recording)
            name, family = kernel.definition.name, kernel.family or None
            facts[call.id] = DerivedFacts(moved, flops, name, family, shapes, dtypes)
    return facts


def _outputs(
    kernel: DerivedDefinition, use: CallUse, sample: Sample | None, recording: Recording
) -> tuple[list[list[int]] | None, list[str]]:
    from kcap.bench.problems import bound_call
    from kcap.schemas.derive.bound_call import invocation_of_bound
    from kcap.schemas.derive.families import REFUSALS

    outputs = kernel.definition.outputs.values()
    dtypes: list[str] = [tensor.dtype for tensor in outputs]
    try:
        sizes = use.bind(invocation_of_bound(bound_call(use.call, sample, recording), use.call.launch)).sizes()
        return [list(kernel.definition.sizes(tensor.shape or (), sizes)) for tensor in outputs], dtypes
    except REFUSALS:  # a value that it needs was not recorded
        return None, dtypes


def _role(call: Call) -> str:
    return call.kind if call.kind != "kernel" or call.work else "view"


def columns() -> pyarrow.Schema:
    """`shapes`, `strides`, `dtypes`, `devices`: of every tensor argument, in order; strides and sizes are elements."""
    import pyarrow as pa

    sizes = pa.list_(pa.list_(pa.int64()))
    types = {
        "call": pa.int64(),  # id in the Recording
        "key": pa.string(),  # kcap.schemas.recording.signature.call_key: the same Call has it in any Recording
        "operator": pa.string(),
        "namespace": pa.string(),
        "role": pa.string(),  # kernel, region (its kernels are rows of their own) or view (no work is done)
        "kind": pa.string(),
        "work": pa.bool_(),
        "parent": pa.string(),
        "definition": pa.string(),  # null: none is derived, or torch was not there
        "family": pa.string(),  # null: no family knows it
        "bytes": pa.int64(),  # that one invocation touches at least, as `kcap show` estimates them
        "flops": pa.int64(),  # of one invocation; 0: not known
        "signature": pa.string(),
        "phase": pa.string(),
        "rank": pa.int32(),
        "mode": pa.string(),
        "count": pa.int64(),
        "shapes": sizes,
        "strides": sizes,
        "dtypes": pa.list_(pa.string()),
        "devices": pa.list_(pa.string()),
        "output_shapes": sizes,  # of the Definition's outputs; null: not known
        "output_dtypes": pa.list_(pa.string()),
        "arguments": pa.string(),  # JSON: the argument tree, as in calls.jsonl
        "launch": pa.string(),  # JSON: as in calls.jsonl; null but for kernels with a source of their own
        "model": pa.string(),
        "framework": pa.string(),
        "framework_version": pa.string(),
        "device": pa.string(),
        "layers_recorded": pa.int32(),
        "layers_model": pa.int32(),
        "world_size": pa.int32(),
    }
    return pa.schema(list(types.items()))


def write_calls(
    path: Path, calls: Iterable[Call], metadata: Metadata, facts: Mapping[int, DerivedFacts] | None = None
) -> None:
    """Write a row for every Count of `calls`; no more than a row group is held. `facts`: by the Call's id."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    schema = columns().with_metadata({"kcap": metadata.model_dump_json()})
    remaining = _rows(calls, metadata, facts or {})
    with ParquetWriter(path, schema, compression="zstd") as writer:
        while batches := list(_batches(islice(remaining, ROW_GROUP), schema)):
            writer.write_table(pa.Table.from_batches(batches), row_group_size=ROW_GROUP)


def _batches(rows: Iterator[dict[str, Any]], schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow as pa

    while chunk := list(islice(rows, CHUNK)):
        yield pa.RecordBatch.from_pylist(chunk, schema)


def _rows(calls: Iterable[Call], metadata: Metadata, facts: Mapping[int, DerivedFacts]) -> Iterator[dict[str, Any]]:
    fields = ("model", "framework", "framework_version", "device", "layers_recorded", "layers_model", "world_size")
    ran = metadata.model_dump(include=set(fields))
    for call in calls:
        derived = facts.get(call.id) or DerivedFacts(moved_bytes(call))
        row = {**_of_call(call), **vars(derived), **ran}
        for count in call.counts:
            yield {**row, "phase": count.phase, "rank": count.rank, "mode": count.mode, "count": count.count}


def _of_call(call: Call) -> dict[str, Any]:
    plain = call.model_dump(mode="json", include={"args", "launch"}, exclude_defaults=True)
    specs = [spec for _, spec in call.tensors()]
    return {
        "call": call.id,
        "key": call_key(call),
        "operator": call.operator,
        "namespace": call.namespace,
        "role": _role(call),
        "kind": call.kind,
        "work": call.work,
        "parent": call.parent,
        "signature": signature(call.args),
        "shapes": [list(spec.shape) for spec in specs],
        "strides": [list(spec.effective_strides) for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "devices": [spec.device for spec in specs],
        "arguments": orjson.dumps(plain.get("args", [])).decode(),
        "launch": orjson.dumps(plain["launch"]).decode() if "launch" in plain else None,
    }

"""`parquet`: every Call as a flat table for DuckDB, Polars, pandas and the Hugging Face hub.

One row is one Count of one Call: a Call that ran in two phases on two ranks has four rows, so that `sum(count)` is
right under any grouping. Regions, views and allocations are there: `where kind = 'kernel' and work` leaves them out.

    duckdb> select operator, phase, sum(count) from 'calls.parquet' where kind = 'kernel' and work group by all
    polars> pl.scan_parquet("calls.parquet").filter(pl.col("work")).group_by("operator").agg(pl.sum("count"))

`recording.json` is whole in the file's metadata, under the key `kcap`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from kcap.bench.exports import Exporter, ExportRequest, exporter
from kcap.schemas.recording.records import Call, Metadata
from kcap.schemas.recording.signature import call_key, signature
from kcap.schemas.results.export_loss import ExportLoss, LossLedger

if TYPE_CHECKING:
    import pyarrow

ROW_GROUP = 65_536
CHUNK = 4096  # rows that are Python objects at a time
NOT_FLAT = "the order of calls, steps, Samples and kernel sources are not in a table of Calls"


@exporter("parquet")
class FlatCalls(Exporter):
    """calls.parquet."""

    def write(self, request: ExportRequest) -> ExportLoss:
        contents, ledger = request.contents, LossLedger()
        write_calls(request.output / "calls.parquet", contents.calls, contents.metadata)
        if contents.recording is not None:
            for call in contents.kernels:
                ledger.reduce(call.operator, NOT_FLAT, call.total)
        return ledger.loss("parquet", contents.total)

    def following(self, output: Path) -> str:
        query = f"select operator, sum(count) from '{output / 'calls.parquet'}' group by all order by 2 desc"
        return f'duckdb -c "{query}"'


def columns() -> pyarrow.Schema:
    """`shapes`, `strides`, `dtypes`, `devices`: of every tensor argument, in order; strides and sizes are elements."""
    import pyarrow as pa

    sizes = pa.list_(pa.list_(pa.int64()))
    types = {
        "call": pa.int64(),  # id in the Recording
        "key": pa.string(),  # kcap.schemas.recording.signature.call_key: the same Call has it in any Recording
        "operator": pa.string(),
        "namespace": pa.string(),
        "kind": pa.string(),
        "work": pa.bool_(),
        "parent": pa.string(),
        "signature": pa.string(),
        "phase": pa.string(),
        "rank": pa.int32(),
        "mode": pa.string(),
        "count": pa.int64(),
        "shapes": sizes,
        "strides": sizes,
        "dtypes": pa.list_(pa.string()),
        "devices": pa.list_(pa.string()),
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


def write_calls(path: Path, calls: Iterable[Call], metadata: Metadata) -> None:
    """Write a row for every Count of `calls`; no more than a row group is held."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    schema = columns().with_metadata({"kcap": metadata.model_dump_json()})
    remaining = _rows(calls, metadata)
    with ParquetWriter(path, schema, compression="zstd") as writer:
        while batches := list(_batches(islice(remaining, ROW_GROUP), schema)):
            writer.write_table(pa.Table.from_batches(batches), row_group_size=ROW_GROUP)


def _batches(rows: Iterator[dict[str, Any]], schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow as pa

    while chunk := list(islice(rows, CHUNK)):
        yield pa.RecordBatch.from_pylist(chunk, schema)


def _rows(calls: Iterable[Call], metadata: Metadata) -> Iterator[dict[str, Any]]:
    fields = ("model", "framework", "framework_version", "device", "layers_recorded", "layers_model", "world_size")
    ran = metadata.model_dump(include=set(fields))
    for call in calls:
        row = {**_of_call(call), **ran}
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

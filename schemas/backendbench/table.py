"""BackendBench's parquet: a trace file's lines with what its suite needs to know of each.

Source: BackendBench's `scripts/parquet_trace_converter.py` and `data_loaders.py`; the columns are its dataset's.
`uuid` is the SHA-256 of arguments and operator, in hexadecimal digits; times are milliseconds, and null where none was
measured; `relative_runtime_to_kernel_launch` is over the time of a kernel that does next to nothing.

Of a file read, `op_name`, `args` and `count` matter; the arguments go through the trace file's grammar.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from kcap.errors import FormatError
from kcap.schemas.backendbench.grammar import Parser
from kcap.schemas.backendbench.lexer import Fault
from kcap.schemas.backendbench.line import MAX_COUNT, MAX_LINE, TraceLine
from kcap.schemas.backendbench.trace_file import Problems
from kcap.schemas.recording.operators import OperatorError, check_operator_name

if TYPE_CHECKING:
    import pyarrow

MAGIC = b"PAR1"
BATCH = 1024
ROW_GROUP = 65_536
NEEDED = ("op_name", "args", "count")
DOMINATED = 1.3  # times the launch of a kernel: BackendBench's threshold, below which launching is most of the time


@dataclass(frozen=True, slots=True)
class TableRow:
    """A line of the parquet; `why_excluded` is empty where BackendBench's suite runs it."""

    op_name: str
    args: str
    count: int
    why_excluded: list[str] = field(default_factory=list)
    runnable: bool = True
    runtime_ms: float | None = None
    relative_runtime: float | None = None

    def as_record(self) -> dict[str, Any]:
        """The row by column, in the file's order."""
        return {
            "uuid": hashlib.sha256(self.args.encode() + self.op_name.encode()).hexdigest(),
            "op_name": self.op_name,
            "args": self.args,
            "count": self.count,
            "is_synthetic": self.count == 0,
            "included_in_benchmark": not self.why_excluded,
            "why_excluded": self.why_excluded,
            "runnable": self.runnable,
            "runtime_ms": self.runtime_ms,
            "relative_runtime_to_kernel_launch": self.relative_runtime,
            "is_overhead_dominated_op": self.relative_runtime is not None and self.relative_runtime < DOMINATED,
        }


def columns() -> pyarrow.Schema:
    import pyarrow as pa

    types = {
        "uuid": pa.string(),
        "op_name": pa.string(),
        "args": pa.string(),
        "count": pa.int64(),
        "is_synthetic": pa.bool_(),
        "included_in_benchmark": pa.bool_(),
        "why_excluded": pa.list_(pa.string()),
        "runnable": pa.bool_(),
        "runtime_ms": pa.float64(),
        "relative_runtime_to_kernel_launch": pa.float64(),
        "is_overhead_dominated_op": pa.bool_(),
    }
    return pa.schema(list(types.items()))


def write_table(path: Path, rows: Iterable[TableRow]) -> None:
    """Write `rows` in their order, a row group at a time."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    schema, remaining = columns(), iter(rows)
    with ParquetWriter(path, schema) as writer:
        while group := [row.as_record() for row in islice(remaining, ROW_GROUP)]:
            writer.write_batch(pa.RecordBatch.from_pylist(group, schema))


def read_table(path: Path, problems: Problems | None = None) -> Iterator[TraceLine]:
    """The rows as a trace file's lines, `line` their number from 1. FormatError (`file:row:column`, the column that of
    `args`) at the first bad row, or for a file that is none of BackendBench's; with `problems` bad rows are counted in
    it and skipped."""
    for number, row in enumerate(_rows(path), 1):
        try:
            yield _line(row, number)
        except (Fault, OperatorError) as error:
            fault = FormatError(f"{path}:{number}:{error.offset + 1}", error.reason)
            if problems is None:
                raise fault from None
            problems.add(fault)


class StoredRow(TypedDict):
    """The columns of a row that are read, before they are checked."""

    op_name: object
    args: object
    count: object


def _line(row: StoredRow, number: int) -> TraceLine:
    operator, text, count = row["op_name"], row["args"], row["count"]
    if not isinstance(operator, str) or not isinstance(text, str):
        raise Fault(0, "op_name and args are texts, neither null nor other bytes than UTF-8")
    if not isinstance(count, int) or not 0 <= count <= MAX_COUNT:
        raise Fault(0, "count is a number from 0 to 2**40")
    if len(text) > MAX_LINE:
        raise Fault(0, f"arguments of more than {MAX_LINE >> 20} MiB")
    check_operator_name(operator)
    args, kwargs = Parser(text).arguments()
    return TraceLine(operator, count, args, kwargs, number)


def _rows(path: Path) -> Iterator[StoredRow]:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow)
            for batch in file.iter_batches(BATCH, columns=list(NEEDED)):
                yield from _records(batch)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:  # ValueError: names that are not UTF-8
        reason = str(error).strip().split("\n")[0]
        raise FormatError(str(path), f"not a readable parquet file ({reason})") from None


def _records(batch: pyarrow.RecordBatch) -> Iterator[StoredRow]:
    """Rows as Python objects; a text that is not UTF-8 becomes bytes, which no row may have."""
    import pyarrow as pa

    texts = [_decoded(batch.column(name)).cast(pa.large_binary()) for name in ("op_name", "args")]
    for operator, args, count in zip(*texts, batch.column("count"), strict=True):
        yield {"op_name": _text(operator.as_py()), "args": _text(args.as_py()), "count": count.as_py()}


def _decoded(column: pyarrow.Array) -> pyarrow.Array:
    return column.dictionary_decode() if hasattr(column, "dictionary_decode") else column


def _text(content: bytes | None) -> str | bytes | None:
    try:
        return content.decode() if content is not None else None
    except UnicodeDecodeError:
        return content


def _check_columns(path: Path, schema: pyarrow.Schema) -> None:
    import pyarrow.types as kinds

    if missing := [name for name in NEEDED if name not in schema.names]:
        raise FormatError(str(path), f"no BackendBench parquet: it has no column {missing[0]}")
    texts = (kinds.is_string, kinds.is_large_string)
    for name, allowed in (("op_name", texts), ("args", texts), ("count", (kinds.is_integer,))):
        kind = schema.field(name).type
        kind = kind.value_type if kinds.is_dictionary(kind) else kind
        if not any(allows(kind) for allows in allowed):
            raise FormatError(str(path), f"no BackendBench parquet: its column {name} is {kind}")

"""BackendBench's parquet: its columns as their code has them, and reading what anyone may have written."""

from __future__ import annotations

import hashlib
import random
from itertools import count

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_backendbench_roundtrip import trace_lines

from kcap.errors import FormatError
from kcap.schemas.backendbench import Problems, serialize
from kcap.schemas.backendbench.table import TableRow, read_table, write_table

MM = "((T([8, 4], f16), T([4, 2], f16)), {})"
numbers = count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tables")


def fresh(folder):
    return folder / f"{next(numbers)}.parquet"


def written(folder, *rows):
    path = fresh(folder)
    write_table(path, rows)
    return path


def table(folder, **columns):
    path = fresh(folder)
    pq.write_table(pa.table(columns), path)
    return path


def test_columns_and_types_are_backendbenchs(folder):
    path = written(folder, TableRow("aten.mm.default", MM, 3))
    assert [(field.name, str(field.type)) for field in pq.read_schema(path)] == [
        ("uuid", "string"),
        ("op_name", "string"),
        ("args", "string"),
        ("count", "int64"),
        ("is_synthetic", "bool"),
        ("included_in_benchmark", "bool"),
        ("why_excluded", "list<element: string>"),
        ("runnable", "bool"),
        ("runtime_ms", "double"),
        ("relative_runtime_to_kernel_launch", "double"),
        ("is_overhead_dominated_op", "bool"),
    ]


def test_the_uuid_is_of_the_arguments_then_the_operator(folder):
    path = written(folder, TableRow("aten.mm.default", MM, 3))
    expected = hashlib.sha256(MM.encode() + b"aten.mm.default").hexdigest()
    assert pq.read_table(path)["uuid"].to_pylist() == [expected]


@pytest.mark.parametrize(("relative", "dominated"), [(None, False), (1.29, True), (1.3, False), (9.0, False)])
def test_a_row_is_overhead_dominated_below_thirteen_tenths_of_a_launch(relative, dominated):
    assert TableRow("a.b.c", MM, 1, relative_runtime=relative).as_record()["is_overhead_dominated_op"] is dominated


def test_a_row_is_synthetic_without_a_count_and_included_without_a_reason(folder):
    records = [TableRow("a.b.c", MM, 0).as_record(), TableRow("a.b.c", MM, 2, ["no"]).as_record()]
    assert [record["is_synthetic"] for record in records] == [True, False]
    assert [record["included_in_benchmark"] for record in records] == [True, False]


@settings(max_examples=60, deadline=None)
@given(lines=st.lists(trace_lines(), max_size=4))
def test_rows_read_back_as_the_lines_they_were_written_from(folder, lines):
    rows = [TableRow(line.operator, serialize(line.args, line.kwargs), line.count) for line in lines]
    read = list(read_table(written(folder, *rows)))
    assert [repr(line.args) for line in read] == [repr(line.args) for line in lines]
    assert [(line.operator, line.count) for line in read] == [(line.operator, line.count) for line in lines]


def test_columns_of_other_writers_are_read(folder):
    path = table(
        folder,
        count=pa.array([4], pa.int32()),
        args=pa.array([MM]).dictionary_encode(),
        op_name=pa.array(["aten.mm.default"], pa.large_string()),
        extra=pa.array([1.5]),
    )
    assert [(line.operator, line.count, len(line.args)) for line in read_table(path)] == [("aten.mm.default", 4, 2)]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"op_name": ["a.b.c"], "args": [MM]}, "no column count"),
        ({"op_name": [1], "args": [MM], "count": [1]}, "column op_name is int64"),
        ({"op_name": ["a.b.c"], "args": [MM], "count": [1.5]}, "column count is double"),
    ],
)
def test_a_parquet_of_something_else_is_refused_by_its_columns(folder, columns, reason):
    with pytest.raises(FormatError, match=reason):
        list(read_table(table(folder, **columns)))


BAD = [
    ("aten.load.default", MM, 1, "reaches files"),
    ("__import__('os')", MM, 1, "not an operator's name"),
    ("a.b.c", "__import__('os').system('true')", 1, "expected"),
    ("a.b.c", MM, -1, "count is a number"),
    ("a.b.c", MM, None, "count is a number"),
    (None, MM, 1, "are texts"),
    ("a.b.c", None, 1, "are texts"),
]


@pytest.mark.parametrize(("operator", "args", "number", "reason"), BAD)
def test_a_bad_row_is_named_and_can_be_skipped(folder, operator, args, number, reason):
    columns = {
        "op_name": pa.array(["aten.mm.default", operator, "aten.mm.default"], pa.string()),
        "args": pa.array([MM, args, MM], pa.string()),
        "count": pa.array([1, number, 3], pa.int64()),
    }
    path = table(folder, **columns)
    with pytest.raises(FormatError, match=rf":2:\d+: .*{reason}"):
        list(read_table(path))
    problems = Problems()
    assert [line.line for line in read_table(path, problems)] == [1, 3]
    assert problems.lines == 1


def test_text_that_is_not_utf8_is_a_bad_row(folder):
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"], pa.binary()).buffers())
    path = table(folder, op_name=broken, args=[MM], count=[1])
    with pytest.raises(FormatError, match="UTF-8"):
        list(read_table(path))


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=256))
def test_arbitrary_bytes_are_refused(folder, content):
    path = fresh(folder)
    for body in (content, b"PAR1" + content + b"PAR1"):
        path.write_bytes(body)
        with pytest.raises(FormatError):
            list(read_table(path))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), flips=st.integers(1, 8))
def test_damaged_files_are_read_or_refused(folder, seed, flips):
    whole = folder / "whole.parquet"
    if not whole.exists():
        write_table(whole, [TableRow("aten.mm.default", MM, number) for number in range(50)])
    content, chance = bytearray(whole.read_bytes()), random.Random(seed)
    for _ in range(flips):
        content[chance.randrange(len(content))] = chance.randrange(256)
    path = fresh(folder)
    path.write_bytes(content)
    try:
        list(read_table(path))
    except FormatError as error:
        assert len(str(error).splitlines()) == 1

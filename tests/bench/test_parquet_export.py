"""The flat table: every Count is a row, typed as a query would want it, and nothing of a Call is missing."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import orjson
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from bench_calls import ADD, METADATA, MM, TROUBLE, call, tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap import bench
from kcap.bench.exports.parquet import columns, write_calls
from kcap.schemas.recording.recording import Argument, Call, Count, Metadata, load
from kcap.schemas.recording.signature import call_key
from kcap.schemas.recording.values import Drift, Folded, Group, Opaque, TorchConstant


def test_a_row_is_a_count_of_a_call(everything, exported):
    output, _ = exported(everything, "parquet")
    rows = pq.read_table(output / "calls.parquet").to_pylist()
    calls = load(everything).calls
    expected = [(one.id, n.phase, n.rank, n.mode, n.count) for one in calls for n in one.counts]
    assert [(r["call"], r["phase"], r["rank"], r["mode"], r["count"]) for r in rows] == expected
    assert [row["key"] for row in rows[:2]] == [call_key(MM)] * 2


def test_kernels_that_work_are_a_filter_away(everything, exported):
    output, loss = exported(everything, "parquet")
    table = pq.read_table(output / "calls.parquet")
    kernels = table.filter(pc.and_(pc.equal(table["kind"], "kernel"), table["work"]))
    assert pc.sum(kernels["count"]).as_py() == loss["total"]


def test_a_row_says_what_one_invocation_costs_and_which_definition_it_is_of(recorded, exported):
    reads_a_few_pages = call(
        "x::attend", tensor(4, 64), tensor(5000, 64, storage=1), tensor(4, 3, dtype="int32", storage=2)
    )
    output, _ = exported(recorded([MM, reads_a_few_pages, TROUBLE["view"], TROUBLE["region"]]), "parquet")
    rows = {row["operator"]: row for row in pq.read_table(output / "calls.parquet").to_pylist()}
    product, attend = rows["aten::mm"], rows["x::attend"]
    assert (product["family"], product["definition"]) == ("gemm", "gemm_bf16_n32_k64")
    assert (product["bytes"], product["flops"]) == (2 * (8 * 64 + 64 * 32 + 8 * 32), 2 * 8 * 64 * 32)
    assert (product["output_shapes"], product["output_dtypes"]) == ([[8, 32]], ["bfloat16"])
    assert attend["bytes"] == 2 * (2 * (4 * 64) + 4 * 4 * 3)
    assert (attend["definition"], attend["output_shapes"]) == (None, None)
    roles = {operator: row["role"] for operator, row in rows.items()}
    assert roles == {"aten::mm": "kernel", "x::attend": "kernel", "aten::view": "view", "vllm::attention": "region"}


def block(language: str) -> str:
    """The one block of bench/README.md in `language` that reads calls.parquet."""
    blocks = re.findall(rf"```{language}\n(.*?)```", (Path(bench.__file__).parent / "README.md").read_text(), re.DOTALL)
    (text,) = (block for block in blocks if "calls.parquet" in block)
    return text


def test_the_readmes_queries_agree_with_each_other_and_with_the_recording(recorded, exported):
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    many = [call("aten::relu", tensor(number, 8), count=number) for number in range(1, 15)]
    path = recorded([MM, ADD, TROUBLE["view"], TROUBLE["region"], TROUBLE["library"], *many])
    file = exported(path, "parquet")[0] / "calls.parquet"
    found = duckdb.sql(block("sql").replace("calls.parquet", str(file))).fetchall()
    scope = {"print": lambda frame: scope.update(frame=frame)}
    exec(block("python").replace("calls.parquet", str(file)), scope)
    assert isinstance(scope["frame"], polars.DataFrame)
    assert scope["frame"].rows() == found
    counts = Counter()
    for one in load(path).kernels():
        counts[one.operator] += sum(n.count for n in one.counts if n.phase == "decode" and one.work)
    assert {operator: count for operator, _, count, _ in found} == {name: n for name, n in counts.items() if n}
    assert [moved for *_, moved in found] == sorted((moved for *_, moved in found), reverse=True)


def test_sizes_are_numbers_and_the_argument_tree_is_json(recorded, exported):
    output, _ = exported(recorded([MM]), "parquet")
    row = pq.read_table(output / "calls.parquet").to_pylist()[0]
    assert row["shapes"] == [[8, 64], [64, 32]]
    assert row["strides"] == [[64, 1], [1, 64]]
    assert (row["dtypes"], row["devices"]) == (["bfloat16"] * 2, ["cuda:0"] * 2)
    assert orjson.loads(row["arguments"])[1]["value"]["tensor"]["strides"] == [1, 64]
    assert (row["model"], row["framework"], row["layers_model"]) == ("kcap/tiny", "vLLM", 2)


def test_the_recordings_metadata_is_in_the_file(recorded, exported):
    output, _ = exported(recorded([MM]), "parquet")
    stored = pq.read_schema(output / "calls.parquet").metadata[b"kcap"]
    assert Metadata.model_validate(orjson.loads(stored)) == METADATA


def test_many_rows_are_several_row_groups(tmp_path):
    counts = [Count(phase="decode", rank=rank, count=1) for rank in range(70_000)]
    write_calls(tmp_path / "c.parquet", [call("aten::relu", tensor(8), counts=counts)], METADATA)
    file = pq.ParquetFile(tmp_path / "c.parquet")
    assert (file.metadata.num_rows, file.num_row_groups) == (70_000, 2)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from([Drift("int"), Folded("layers.*"), Opaque("x"), Group(2, 1), TorchConstant("dtype", "int8")])
    | st.builds(
        tensor, st.integers(0, 9), offset=st.none() | st.integers(0, 9), dtype=st.sampled_from(["int8", "bool"])
    )
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=6)


@settings(max_examples=60, deadline=None)
@given(trees=st.lists(st.lists(values, max_size=4), min_size=1, max_size=4))
def test_a_call_can_be_rebuilt_from_its_row(tmp_path_factory, trees):
    calls = [call("a::b", *tree, id=number) for number, tree in enumerate(trees)]
    path = tmp_path_factory.mktemp("rows") / "c.parquet"
    write_calls(path, calls, METADATA)
    rows = pq.read_table(path).to_pylist()
    rebuilt = [
        Call(
            id=row["call"],
            operator=row["operator"],
            args=[Argument.model_validate(argument) for argument in orjson.loads(row["arguments"])],
            counts=[Count(phase=row["phase"], rank=row["rank"], mode=row["mode"], count=row["count"])],
        )
        for row in rows
    ]
    assert rebuilt == calls
    assert pq.read_schema(path).equals(columns())

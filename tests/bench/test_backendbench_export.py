"""BackendBench's files: what its own reader finds in them, and that nothing in them ends its run."""

from __future__ import annotations

import re

import pyarrow.parquet as pq
import pytest
import torch
from bench_calls import ADD, MM, SCALED, TROUBLE, call, reasons, tensor
from evaluated import backendbench_tensor, evaluate

from kcap.schemas.backendbench import read
from kcap.schemas.backendbench.table import read_table
from kcap.schemas.recording.signature import call_key
from kcap.schemas.results.measurement import Measurement, write_measurements

SKIPPED = "embedding.default embedding.out scatter.src scatter.reduce scatter.value gather.out gather.dimname".split()


def rows_of(output):
    return pq.read_table(output / "trace.parquet").to_pylist()


def included(output):
    return [row for row in rows_of(output) if row["included_in_benchmark"]]


def test_each_trouble_is_lost_for_its_own_reason(everything, exported):
    _, loss = exported(everything, "backendbench")
    expected = {
        "library": "torch alone does not register _C",
        "name": "-9 to 9",
        "substring": "-9 to 9",
        "integers": "-9 to 9",
        "fp8": "float8_e4m3fn",
        "triton": "Triton",
        "opaque": "opaque",
        "empty": "no elements",
        "random": "random ops",
        "creation": "missing in its list",
    }
    found = reasons(loss)
    for kind, words in expected.items():
        assert words in found[TROUBLE[kind].operator], kind
    assert set(found) == {TROUBLE[kind].operator for kind in expected}


def test_what_the_suite_runs_is_what_its_code_can_make_and_call(everything, exported):
    output, loss = exported(everything, "backendbench")
    ran = included(output)
    assert sum(row["count"] for row in ran) == loss["exported"] == 140
    for row in ran:
        assert not any(word in row["op_name"] for word in SKIPPED)
        args, kwargs = evaluate(row["args"], backendbench_tensor)
        namespace, name, overload = row["op_name"].split(".")
        assert torch.is_tensor(getattr(getattr(getattr(torch.ops, namespace), name), overload)(*args, **kwargs))


def test_every_line_of_the_trace_file_is_one_that_backendbench_reads(everything, exported):
    output, _ = exported(everything, "backendbench")
    operator, found = None, []
    for line in (output / "trace.txt").read_text().splitlines():
        if match := re.match("Operator: (.*)", line):
            operator = match.group(1)
            continue
        match = re.match(r"cnt: (\d+), (.*)", line)
        assert match is not None
        found.append((operator, int(match.group(1)), match.group(2)))
    assert found == [(row["op_name"], row["count"], row["args"]) for row in rows_of(output)]


def test_both_files_read_back_alike(everything, exported):
    output, _ = exported(everything, "backendbench")
    assert list(read(output / "trace.txt")) == list(read_table(output / "trace.parquet"))


def test_a_drifting_scalar_is_its_first_samples(recorded, exported):
    output, loss = exported(recorded([SCALED]), "backendbench")
    assert [row["args"] for row in rows_of(output)] == ["((T([8], bf16), 0.5), {})"]
    assert "drifting" in loss["reduced"][0]["reason"]


def test_what_is_lost_is_not_reduced_too(recorded, exported):
    shifted = call("_C::rms_norm", tensor(8, offset=4))
    _, loss = exported(recorded([shifted]), "backendbench")
    assert (loss["exported"], loss["reduced"]) == (0, [])


def test_calls_with_one_line_are_one_row(recorded, exported):
    twice = [call("aten::relu", tensor(8, device="cuda:0")), call("aten::relu", tensor(8, device="cuda:1"), count=5)]
    output, loss = exported(recorded(twice), "backendbench")
    assert [row["count"] for row in rows_of(output)] == [15]
    assert loss["exported"] == 15


def measured(one, tmp_path, **more):
    path = tmp_path / "m.jsonl"
    known = {"call": 0, "key": call_key(one), "operator": one.operator, "device": "cuda:0"}
    write_measurements(path, [Measurement(**known, **more, median_us=median) for median in (10.0, 30.0)])
    return path


def test_measurements_give_times_over_the_floor(recorded, exported, tmp_path):
    path = recorded([MM, ADD])
    output, _ = exported(path, "backendbench", "--measurements", measured(MM, tmp_path, floor_us=16.0))
    add, mm = rows_of(output)
    assert (mm["runtime_ms"], mm["relative_runtime_to_kernel_launch"]) == (0.02, 1.25)
    assert mm["is_overhead_dominated_op"] is True
    assert (add["runtime_ms"], add["is_overhead_dominated_op"]) == (None, False)


def test_a_call_that_failed_in_replay_is_excluded_as_backendbench_would(recorded, exported, tmp_path):
    path = tmp_path / "m.jsonl"
    write_measurements(
        path, [Measurement(call=0, key=call_key(MM), operator="aten::mm", status="failed", reason="no memory")]
    )
    output, loss = exported(recorded([MM]), "backendbench", "--measurements", path)
    (row,) = rows_of(output)
    assert (row["why_excluded"], row["runnable"]) == (["Failed to run: no memory"], False)
    assert loss["exported"] == 0


def test_measurements_of_something_else_are_refused(recorded, kcap, tmp_path):
    path = measured(ADD, tmp_path)
    done = kcap("export", recorded([MM]), "--to", "backendbench", "-o", tmp_path / "o", "--measurements", path)
    assert (done.code, "measures no call" in done.err) == (2, True)


@pytest.mark.parametrize("kind", ["integers", "name", "substring"])
def test_integers_that_index_never_reach_the_suite(kind, recorded, exported):
    output, _ = exported(recorded([TROUBLE[kind]]), "backendbench")
    assert included(output) == []


INDICES = tensor(4, dtype="int64")


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (call("aten::embedding", tensor(8, 8), INDICES), "names that contain embedding.default"),
        (call("aten::scatter.src", tensor(8), 0, INDICES, tensor(4)), "names that contain scatter.src"),
        (call("aten::gather", tensor(8), 0, INDICES), "-9 to 9"),
        (call("aten::scatter_add", tensor(8), 0, INDICES, tensor(4)), "-9 to 9"),
        (call("aten::index.Tensor", tensor(8), [tensor(8, dtype="bool")]), "missing in its list"),
        (call("aten::masked_fill_.Scalar", tensor(8), tensor(8, dtype="bool"), 1.0), "missing in its list"),
        (call("aten::masked_fill.Scalar", tensor(8), tensor(8, dtype="bool"), 1.0), None),
        (call("aten::cat", [tensor(8), tensor(8)]), "tensor creation"),
        (call("aten::native_dropout", tensor(8), 0.5, True), "another draw"),
        (call("aten::bernoulli", tensor(8)), "random ops"),
    ],
    ids=lambda value: getattr(value, "operator", None),
)
def test_an_exclusion_has_the_reason_that_its_code_has(one, words, recorded, exported):
    output, loss = exported(recorded([one]), "backendbench")
    (row,) = rows_of(output)
    assert row["included_in_benchmark"] == (words is None)
    assert [words in reason for reason in row["why_excluded"][:1]] == [True] * (words is not None)
    assert (one.operator in reasons(loss)) == (words is not None)

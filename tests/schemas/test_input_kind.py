"""What is at a path, told the same to every command."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from kcap.errors import CallError
from kcap.replay import source
from kcap.schemas.backendbench.table import TableRow, write_table
from kcap.schemas.input_kind import detect_input, trace_lines

TRACES = Path(__file__).parents[1] / "data" / "backendbench-traces"
MM = "((T([8, 4], f16), T([4, 2], f16)), {})"


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "trace.parquet"
    write_table(path, [TableRow("aten.mm.default", MM, 3)])
    return path


def test_each_kind_is_told_by_what_is_there(recording, parquet, tmp_path):
    (tmp_path / "dataset" / "definitions").mkdir(parents=True)
    other = tmp_path / "parquet-by-its-content"
    other.write_bytes(parquet.read_bytes())
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(b"no")
    expected = {
        recording: "recording",
        tmp_path / "dataset": "dataset",
        parquet: "parquet",
        other: "parquet",
        damaged: "parquet",
        TRACES / "alexnet_training.txt": "trace",
        tmp_path: "recording",
    }
    assert {path: detect_input(path) for path in expected} == expected


def test_nothing_there_names_what_would_do(tmp_path):
    with pytest.raises(CallError, match="no such Recording, dataset or trace file"):
        detect_input(tmp_path / "none")


def test_a_trace_file_and_its_parquet_are_the_same_lines(parquet, tmp_path):
    text = tmp_path / "trace.txt"
    text.write_text(f"Operator: aten.mm.default\ncnt: 3, {MM}\n")
    assert list(trace_lines(text)) == list(trace_lines(parquet))


def test_a_parquet_shows_and_replays_like_a_trace_file(parquet, kcap):
    shown = orjson.loads(kcap("show", parquet, "--json").out)
    assert [(row["name"], row["count"]) for row in shown["rows"]] == [("aten::mm", 3)]
    replayed = kcap("replay", parquet, "--device", "cpu", "--seconds", "0.01", "--json")
    assert replayed.code == 0, replayed.err
    assert orjson.loads(replayed.out)["calls"][0]["operator"] == "aten::mm"


def test_a_dataset_that_is_to_be_replayed_wants_trust(kcap, tmp_path):
    (tmp_path / "definitions").mkdir()
    done = kcap("replay", tmp_path)
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert "--trust" in done.err


def test_a_signature_on_three_lines_is_one_call_with_their_sum(tmp_path):
    path = tmp_path / "trace.txt"
    path.write_text("Operator: aten.mm.default\n" + "".join(f"cnt: {count}, {MM}\n" for count in (1, 2, 3)))
    (call,) = source.calls_of_trace(path, None)
    assert (call.total, [one.count for one in call.counts]) == (6, [6])

"""`kcap show` of a FlashInfer-Bench dataset: its Definitions with what there is of each."""

from __future__ import annotations

import orjson
import pytest

from kcap.schemas.flashinfer.dataset import WorkloadCount, write_dataset
from kcap.schemas.flashinfer.definition import (
    AxisConst,
    AxisVar,
    Definition,
    DefinitionTensor,
    RandomInput,
    SafetensorsInput,
    Workload,
)
from kcap.schemas.recording.records import Count

TENSOR = DefinitionTensor(shape=["m", "n"], dtype="bfloat16")


def definition(name):
    axes = {"m": AxisVar(), "n": AxisConst(value=4)}
    reference = "def run(x):\n    return x + 1\n"
    return Definition(
        name=name, op_type="add", axes=axes, inputs={"x": TENSOR}, outputs={"y": TENSOR}, reference=reference
    )


@pytest.fixture
def dataset(tmp_path):
    """`often` has a Call of two Samples that ran 30 times; `rare` a workload without its blob, and no counts."""
    blob = SafetensorsInput(path="./blob/none.safetensors", tensor_key="x")
    workloads = {
        "often": [Workload(uuid=name, axes={"m": 2}, inputs={"x": RandomInput()}) for name in ("one", "two")],
        "rare": [Workload(uuid="three", axes={"m": 2}, inputs={"x": blob})],
    }
    counts = [
        WorkloadCount(
            definition="often",
            workload=name,
            operator="aten::add",
            call=7,
            samples=2,
            counts=[Count(phase="prefill", count=10), Count(phase="decode", count=20)],
        )
        for name in ("one", "two")
    ]
    write_dataset(tmp_path / "set", [definition("rare"), definition("often")], workloads, {}, counts)
    return tmp_path / "set"


@pytest.mark.parametrize("words", [("--by", "family"), ("--parts",), ("--all",), ("--measurements", "m")])
def test_what_is_of_calls_is_refused_of_what_was_not_recorded(dataset, kcap, words):
    ran = kcap("show", dataset, *words)
    assert ran.code == 2 and f"is a dataset: {words[0]}: of what was recorded only" in ran.err


def test_definitions_are_shown_with_their_workloads_and_counts(dataset, kcap):
    shown = orjson.loads(kcap("show", dataset, "--json").out)["definitions"]
    assert [(row["name"], row["workloads"], row["missing"], row["count"]) for row in shown] == [
        ("often", 2, 0, 30),
        ("rare", 1, 1, 0),
    ]
    assert shown[0]["axes"] == {"m": None, "n": 4}


def test_the_table_tells_axes_that_vary_from_those_that_do_not(dataset, kcap):
    done = kcap("show", dataset)
    assert "m=·, n=4" in done.out
    assert "2 Definitions, 3 workloads" in done.out
    assert done.err.startswith("Next: kcap export")


@pytest.mark.parametrize("width", [70, 100, 200])
def test_names_and_counts_are_whole_at_every_width(width, tmp_path, kcap, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    name = "rope_with_cos_sin_cache_neox_style_d128"
    count = WorkloadCount(
        definition=name, workload="one", operator="x::y", call=0, counts=[Count(phase="other", count=1234)]
    )
    workloads = {name: [Workload(axes={"m": 3}, inputs={"x": RandomInput()}, uuid="one")]}
    write_dataset(tmp_path / "set", [definition(name)], workloads, {}, [count])
    heading, row = kcap("show", tmp_path / "set").out.splitlines()[:2]
    assert name in row and "1,234" in row and "count" in heading
    assert max(len(heading), len(row)) <= width
    assert ("type" in heading) == (width > 70)


def test_top_says_how_many_more_there_are(dataset, kcap):
    shown = orjson.loads(kcap("show", dataset, "--json", "--top", "1").out)
    assert ([row["name"] for row in shown["definitions"]], shown["more"]) == (["often"], 1)

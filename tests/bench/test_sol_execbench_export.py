"""SOL-ExecBench's folders: what its validators and its driver ask for."""

from __future__ import annotations

import orjson
import pytest
from bench_calls import reasons
from bench_datasets import SCALE, counted, definition, of, workload, write_small
from safetensors.torch import load_file

from kcap.bench.exports.sol_execbench import tolerance
from kcap.schemas.flashinfer.dataset import write_dataset
from kcap.schemas.flashinfer.definition import Definition, ScalarInput


def lines(path):
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_each_definition_is_a_folder_with_every_workload(exported, tmp_path):
    output, loss = exported(write_small(tmp_path / "set"), "sol-execbench")
    problems = {str(path.parent.relative_to(output)) for path in output.rglob("definition.json")}
    assert problems == {"L1/scale", "L1/lookup", "L2/masked", "L1/two", "L1/fp8"}
    assert [one["uuid"] for one in lines(output / "L1" / "lookup" / "workload.jsonl")] == ["l1", "l2"]
    assert (loss["exported"], loss["total"]) == (80, 80)


def test_a_call_whose_samples_are_one_workload_counts_once(exported, tmp_path):
    given = workload(SCALE, "s", eps=ScalarInput(value=1.0))
    counts = [counted(SCALE, "s", 9, 0, samples=2)] * 2
    write_dataset(tmp_path / "set", [SCALE], {"scale": [given]}, {}, counts)
    _, loss = exported(tmp_path / "set", "sol-execbench")
    assert (loss["exported"], loss["total"]) == (9, 9)


@pytest.mark.parametrize("target", ["flashinfer-bench", "kernelbench", "kernel-description", "sol-execbench"])
def test_every_target_of_a_dataset_has_the_same_total(target, exported, tmp_path):
    assert exported(write_small(tmp_path / "set"), target)[1]["total"] == 80


def test_a_definition_is_one_of_flashinfer_bench_without_tags(exported, tmp_path):
    output, _ = exported(write_small(tmp_path / "set"), "sol-execbench")
    written = orjson.loads((output / "L2" / "masked" / "definition.json").read_bytes())
    assert "tags" not in written
    assert all("optional" not in tensor for tensor in written["inputs"].values())
    assert Definition.model_validate(written).name == "masked"


def test_blobs_are_named_from_the_root_that_its_driver_is_told(exported, tmp_path):
    output, _ = exported(write_small(tmp_path / "set"), "sol-execbench")
    first = lines(output / "L1" / "lookup" / "workload.jsonl")[0]["inputs"]
    assert first["table"] == {"type": "random"}
    assert load_file(output / first["rows"]["path"])[first["rows"]["tensor_key"]].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("dtypes", "rtol", "ratio"),
    [(["bfloat16"], 3.2e-2, 0.99), (["float32", "bfloat16"], 3.2e-2, 0.99), (["int64"], 0.0, 1.0)],
)
def test_the_tolerance_is_that_of_the_widest_output(dtypes, rtol, ratio):
    outputs = {f"y{number}": of("m n", dtype) for number, dtype in enumerate(dtypes)}
    found = tolerance(definition("d", {"x": of("m n")}, outputs, "x"))
    assert (found["max_rtol"], found["max_atol"], found["required_matched_ratio"]) == (rtol, rtol, ratio)
    assert found["allow_negative_inf"] is True  # where both have it


X, Y = {"x": of("m n")}, {"y": of("m n")}


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (definition("d", X, Y, "", reference="def run(other):\n    return other\n"), "parameters"),
        (definition("d", {"n": of("m")}, {"y": of("m")}, "n"), "named as an axis: n"),
        (definition("d", {**X, "b": of("n", optional=True)}, Y, "x"), "no optional inputs: b"),
    ],
)
def test_what_its_validators_refuse_is_a_loss(one, words, exported, tmp_path):
    given = workload(one, "w")
    given = given.model_copy(update={"inputs": {k: v for k, v in given.inputs.items() if k != "b"}})
    write_dataset(tmp_path / "set", [one], {"d": [given]}, {})
    _, loss = exported(tmp_path / "set", "sol-execbench")
    assert words in reasons(loss)["d"]

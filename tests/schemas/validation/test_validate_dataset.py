from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import save_file

from kcap.schemas.flashinfer.dataset import Dataset, WorkloadCount, blob_path, write_dataset
from kcap.schemas.flashinfer.definition import Definition, RandomInput, SafetensorsInput, ScalarInput, Workload
from kcap.schemas.validation.dataset import check_dataset
from kcap.schemas.validation.report import Report

PUBLISHED = Path(__file__).parents[2] / "data" / "flashinfer-trace"
TAKE = Definition.model_validate(
    {
        "name": "take_n4",
        "op_type": "take",
        "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 4}},
        "inputs": {
            "x": {"shape": ["M", "N"], "dtype": "float32"},
            "rows": {"shape": ["M"], "dtype": "int64"},
            "scale": {"shape": None, "dtype": "float32"},
        },
        "outputs": {"y": {"shape": ["M", "N"], "dtype": "float32"}},
        "reference": "def run(x, rows, scale):\n    return x[rows] * scale",
    }
)
BLOB = blob_path(TAKE, "u1")
WORKLOADS, DEFINITIONS = "workloads/take/take_n4.jsonl", "definitions/take/take_n4.json"
SOLUTION = {
    "name": "fast",
    "definition": "take_n4",
    "author": "someone",
    "spec": {"language": "python", "target_hardware": ["cpu"], "entry_point": "main.py::run"},
    "sources": [{"path": "main.py", "content": "def run(): ..."}],
}
EVALUATION = {"status": "TIMEOUT", "environment": {"hardware": "cpu"}, "timestamp": "now"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rows = SafetensorsInput(path=BLOB, tensor_key="rows")
    workload = Workload(
        uuid="u1", axes={"M": 3}, inputs={"x": RandomInput(), "rows": rows, "scale": ScalarInput(value=0.5)}
    )
    count = WorkloadCount(definition="take_n4", workload="u1", operator="aten::index", call=0)
    write_dataset(tmp_path / "d", [TAKE], {"take_n4": [workload]}, {"u1": {"rows": torch.arange(3)}}, [count])
    return tmp_path / "d"


def told(root: Path) -> list[str]:
    report = Report()
    check_dataset(report, root)
    return [str(problem).replace(f"{root}/", "") for problem in report.problems]


def put(root: Path, path: str, *documents: Any) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(b"\n".join(map(orjson.dumps, documents)))


def line(root: Path, **change: Any) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads((root / WORKLOADS).read_bytes())
    return document | {"workload": document["workload"] | change}


def test_the_published_dataset_is_valid_and_what_it_lacks_is_told(kcap: Callable[..., Any]) -> None:
    ran = kcap("validate", PUBLISHED)
    assert ran.code == 0
    *warnings, last = ran.out.splitlines()
    assert last == f"{PUBLISHED}: valid, a FlashInfer-Bench dataset"
    assert [warning.split(": ")[1] for warning in warnings] == ["warning"] * 6
    assert sum("run takes routing_logits, routing_bias" in warning for warning in warnings) == 2
    missing = [int(warning.split()[2]) for warning in warnings if "blobs that are not there" in warning]
    assert sum(missing) == 336  # of 149 Workloads


def test_a_dataset_that_kcap_writes_has_no_problem(root: Path) -> None:
    assert told(root) == []


def test_a_folder_without_definitions_is_no_dataset(tmp_path: Path) -> None:
    assert told(tmp_path) == [f"{tmp_path}: not a dataset: it has no definitions/"]


def test_workloads_that_are_no_instances_are_told(root: Path) -> None:
    inputs = {"x": {"type": "scalar", "value": 1}, "rows": {"type": "random"}, "scale": {"type": "random"}}
    put(root, WORKLOADS, line(root), line(root, uuid="u2", axes={}, inputs=inputs))
    assert told(root) == [
        f"{WORKLOADS}:2: workload.axes: M has no size",
        f"{WORKLOADS}:2: workload.inputs.x: a tensor, but given as a scalar",
        f"{WORKLOADS}:2: workload.inputs.scale: a scalar is given by its value, not as random",
    ]


def test_a_workload_of_no_definition_is_told(root: Path) -> None:
    put(root, WORKLOADS, line(root), line(root, uuid="u2") | {"definition": "other"})
    assert told(root) == [f"{WORKLOADS}:2: definition: other is not in definitions/"]


def test_a_uuid_that_is_there_twice_is_told(root: Path) -> None:
    put(root, WORKLOADS, line(root), line(root))
    assert told(root) == [f"{WORKLOADS}:2: workload.uuid: u1 is there twice"]


def test_an_evaluated_workload_is_in_the_wrong_folder(root: Path) -> None:
    put(root, WORKLOADS, line(root) | {"solution": "fast"})
    assert told(root) == [f"{WORKLOADS}:1: solution, evaluation: must be null in workloads/"]


def test_files_that_lie_elsewhere_than_their_content_says_are_told(root: Path) -> None:
    traced = line(root) | {"solution": "fast", "evaluation": EVALUATION}
    (root / "definitions/take").rename(root / "definitions/give")
    (root / WORKLOADS).rename(root / "workloads/take/take_n5.jsonl")
    put(root, "solutions/someone/take/take_n5/fast.json", SOLUTION)
    put(root, "traces/someone/take/take_n5.jsonl", traced)
    ends = "for what it holds, its path must end in"
    assert told(root) == [
        f"definitions/give/take_n4.json: {ends} take/take_n4.json",
        f"workloads/take/take_n5.jsonl: {ends} take/take_n4.jsonl",
        f"solutions/someone/take/take_n5/fast.json: {ends} take_n4/fast.json",
        f"traces/someone/take/take_n5.jsonl: {ends} take_n4.jsonl",
    ]


def test_names_that_are_there_twice_are_told(root: Path) -> None:
    shutil.copytree(root / "definitions/take", root / "definitions/old/take")
    put(root, "solutions/a/take/take_n4/fast.json", SOLUTION)
    put(root, "solutions/b/take/take_n4/fast.json", SOLUTION)
    assert told(root) == [
        "definitions/take/take_n4.json: name: take_n4 is there twice",
        "solutions/b/take/take_n4/fast.json: name: fast is there twice",
    ]


def test_traces_and_solutions_of_what_is_not_there_are_told(root: Path) -> None:
    put(root, "solutions/a/take/take_n9/fast.json", SOLUTION | {"definition": "take_n9"})
    traced = line(root) | {"solution": "fast", "evaluation": EVALUATION}
    put(root, "traces/take/take_n4.jsonl", traced, line(root), traced | {"definition": "take_n8", "solution": "slow"})
    assert [problem for problem in told(root) if "must end in" not in problem] == [
        "solutions/a/take/take_n9/fast.json: definition: take_n9 is not in definitions/",
        "traces/take/take_n4.jsonl:1: solution: fast solves take_n9",
        "traces/take/take_n4.jsonl:2: solution, evaluation: a Workload's line belongs into workloads/",
        "traces/take/take_n4.jsonl:3: definition: take_n8 is not in definitions/",
    ]


def test_counts_of_a_workload_that_is_not_there_are_told(root: Path) -> None:
    put(root, "counts.jsonl", {"definition": "take_n4", "workload": "u7", "operator": "aten::index", "call": 0})
    assert told(root) == ["counts.jsonl:1: workload: take_n4 has no Workload u7"]


def test_a_broken_definition_leaves_the_others_checked(root: Path) -> None:
    (root / DEFINITIONS).write_text("{")
    problems = told(root)
    assert problems[0].startswith(f"{DEFINITIONS}:1:")
    assert f"{WORKLOADS}:1: definition: take_n4 is not in definitions/" in problems


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"rows": torch.arange(3, dtype=torch.int32)}, f"rows is int32 in {BLOB}, not int64"),
        ({"rows": torch.arange(4)}, f"rows is [4] in {BLOB}, not [3]"),
        ({"rows": torch.arange(3)[None]}, f"rows is [1, 3] in {BLOB}, not [3]"),
        ({"columns": torch.arange(3)}, f"{BLOB} has no tensor rows"),
    ],
)
def test_a_blob_of_another_dtype_or_shape_is_told(root: Path, tensors: dict[str, torch.Tensor], reason: str) -> None:
    save_file(tensors, root / BLOB)
    assert told(root) == [f"{WORKLOADS}:1: workload.inputs.rows: {reason}"]


def test_a_damaged_blob_is_told(root: Path) -> None:
    (root / BLOB).write_bytes(b"\xff" * 64)
    (problem,) = told(root)
    assert problem.startswith(f"{WORKLOADS}:1: workload.inputs.rows: take_n4_u1.safetensors: not a readable")


def test_a_missing_blob_is_a_warning(root: Path) -> None:
    (root / BLOB).unlink()
    assert told(root) == [f"{WORKLOADS}: warning: 1 inputs are in blobs that are not there, first {BLOB}"]
    assert Dataset.load(root).workloads


def test_a_blob_outside_the_dataset_is_told_and_never_opened(root: Path) -> None:
    save_file({"rows": torch.arange(4)}, root.parent / "out.safetensors")
    inputs = line(root)["workload"]["inputs"]
    path = {"type": "safetensors", "path": "../out.safetensors", "tensor_key": "rows"}
    put(root, WORKLOADS, line(root, inputs=inputs | {"rows": path}))
    (problem,) = told(root)
    assert problem.startswith(f"{WORKLOADS}:1: workload.inputs.rows: '../out.safetensors': a blob's path is relative")


def test_what_an_export_writes_beside_a_dataset_is_checked_too(root: Path) -> None:
    put(root, "loss.json", {"target": "flashinfer-bench", "total": 3, "exported": 2})
    put(root, "calling_record.json", {"model": "m", "framework": "vLLM"})
    assert told(root) == [
        "loss.json: exported and lost do not add up to the total",
        "calling_record.json: kernels: Field required",
    ]

from __future__ import annotations

import re
import shutil
from pathlib import Path

import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kcap.errors import FormatError
from kcap.schemas.flashinfer import trace
from kcap.schemas.flashinfer.dataset import Dataset, WorkloadCount, blob_path, files, write_dataset
from kcap.schemas.flashinfer.definition import (
    Definition,
    RandomInput,
    SafetensorsInput,
    ScalarInput,
    Workload,
    WorkloadInput,
    check_workload,
)
from kcap.schemas.recording.records import Count

PUBLISHED = Path(__file__).parents[2] / "data" / "flashinfer-trace"
DEFINITION = Definition.model_validate(
    {
        "name": "take_n4",
        "op_type": "take",
        "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 4}},
        "inputs": {
            "x": {"shape": ["M", "N"], "dtype": "float32"},
            "rows": {"shape": ["M"], "dtype": "int64"},
            "scale": {"shape": None, "dtype": "float32"},
            "count": {"shape": None, "dtype": "int32", "optional": True},
        },
        "outputs": {"y": {"shape": ["M", "N"], "dtype": "float32"}},
        "reference": "def run(x, rows, scale, count=0):\n    return x[rows] * scale",
    }
)
BLOB = SafetensorsInput(path=blob_path(DEFINITION, "u1"), tensor_key="rows")
WORKLOAD = Workload(
    uuid="u1", axes={"M": 3}, inputs={"x": RandomInput(), "rows": BLOB, "scale": ScalarInput(value=0.5)}
)
COUNT = WorkloadCount(
    definition="take_n4",
    workload="u1",
    operator="aten::index.Tensor",
    call=7,
    samples=2,
    counts=[Count(phase="decode", mode="graph", count=12)],
)
inputs: st.SearchStrategy[WorkloadInput] = st.one_of(
    st.just(RandomInput()),
    st.builds(
        ScalarInput,
        value=st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False),
    ),
    st.builds(SafetensorsInput, path=st.text(min_size=1), tensor_key=st.text(min_size=1)),
)
workloads = st.builds(
    Workload,
    uuid=st.uuids().map(str),
    axes=st.dictionaries(st.text(), st.integers(0, 2**62)),
    inputs=st.dictionaries(st.text(), inputs),
)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    tensors = {"rows": torch.arange(6)[::2]}  # a view: safetensors takes contiguous tensors only
    write_dataset(tmp_path / "d", [DEFINITION], {"take_n4": [WORKLOAD]}, {"u1": tensors}, [COUNT])
    return Dataset.load(tmp_path / "d")


def changed(**axes_or_inputs: object) -> list[str]:
    return check_workload(DEFINITION, WORKLOAD.model_copy(update=axes_or_inputs))


def test_all_published_workloads_are_written_as_they_were_read() -> None:
    lines = [line for path in files(PUBLISHED / "workloads", "jsonl") for line in path.read_bytes().splitlines()]
    read = [one for path in files(PUBLISHED / "workloads", "jsonl") for one in trace.read(path)]
    assert len(read) == 395
    assert [orjson.loads(one.line()) for one in read] == [orjson.loads(line) for line in lines]


def test_the_published_workloads_are_instances_of_their_definitions() -> None:
    published = Dataset.load(PUBLISHED)
    assert len(published.definitions) == 78
    for name, given_ in published.workloads.items():
        assert [check_workload(published.definitions[name], workload) for workload in given_] == [[]] * len(given_)


def test_a_dataset_is_read_as_it_was_written(dataset: Dataset) -> None:
    assert dataset.definitions == {"take_n4": DEFINITION}
    assert dataset.workloads == {"take_n4": [WORKLOAD]}
    assert dataset.counts == [COUNT]
    assert torch.equal(dataset.blob(BLOB), torch.tensor([0, 2, 4]))
    assert {str(path.relative_to(dataset.root)) for path in dataset.root.rglob("*") if path.is_file()} == {
        "definitions/take/take_n4.json",
        "workloads/take/take_n4.jsonl",
        "blob/workloads/take/take_n4/take_n4_u1.safetensors",
        "counts.jsonl",
    }


def test_flashinfer_benchs_own_code_reads_what_is_written(dataset: Dataset) -> None:
    data = pytest.importorskip("flashinfer_bench.data")
    read = data.TraceSet.from_path(str(dataset.root))
    assert list(read.definitions) == ["take_n4"]
    assert read.workloads["take_n4"][0].workload.uuid == "u1"
    assert torch.equal(read.get_workload_blob_tensor(BLOB.path)["rows"], torch.tensor([0, 2, 4]))


@given(workloads)
def test_a_line_is_read_back(workload: Workload) -> None:
    one = trace.Trace(definition="d", workload=workload)
    assert trace.Trace.model_validate(orjson.loads(one.line())) == one
    kinds = {name: type(given_.value) for name, given_ in workload.inputs.items() if isinstance(given_, ScalarInput)}
    again = trace.Trace.model_validate(orjson.loads(one.line())).workload.inputs
    assert {name: type(again[name].value) for name in kinds} == kinds  # true stays no 1, and 1.0 no 1


@settings(max_examples=30)
@given(st.binary())
def test_arbitrary_bytes_are_no_workloads(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    path.write_bytes(content)
    if content.strip():
        with pytest.raises(FormatError, match=r"t\.jsonl:\d"):
            list(trace.read(path))


@settings(max_examples=30, deadline=None)
@given(st.binary())
def test_an_arbitrary_blob_is_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    root = tmp_path_factory.mktemp("b")
    (root / "x.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match=r"x\.safetensors: rows: not readable"):
        Dataset(root).blob(SafetensorsInput(path="x.safetensors", tensor_key="rows"))


def test_a_blob_that_is_not_there_or_lacks_the_tensor_is_named(dataset: Dataset) -> None:
    with pytest.raises(FormatError, match=r"u1\.safetensors: columns: not readable"):
        dataset.blob(BLOB.model_copy(update={"tensor_key": "columns"}))
    dataset.blob_file(BLOB).unlink()
    with pytest.raises(FormatError, match=r"u1\.safetensors: rows: not readable \(No such file"):
        dataset.blob(BLOB)


@pytest.mark.parametrize("path", ["/etc/{0}", "../{0}", "blob/../../{0}", "./../{0}", "x\0y"])
def test_a_blob_is_never_read_outside_the_dataset(dataset: Dataset, path: str) -> None:
    save_file({"rows": torch.arange(3)}, dataset.root.parent / "secret.safetensors")
    with pytest.raises(FormatError, match="relative to the dataset"):
        dataset.blob(SafetensorsInput(path=path.format("secret.safetensors"), tensor_key="rows"))


@pytest.mark.parametrize("path", ["y" * 256, "ä" * 128, "z/" * 1025])
def test_a_blob_has_a_name_that_a_file_can_have(dataset: Dataset, path: str) -> None:
    with pytest.raises(FormatError, match="path is too long"):
        dataset.blob_file(BLOB.model_copy(update={"path": path}))


def test_a_folder_without_definitions_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="not a dataset"):
        Dataset.load(tmp_path)


@pytest.mark.parametrize("number", ['"count":18446744073709551615', '"count":1,"rank":2147483648', '"count":-1'])
def test_numbers_that_no_sum_or_table_could_hold_are_refused(dataset: Dataset, number: str) -> None:
    path = dataset.root / "counts.jsonl"
    path.write_bytes(re.sub(rb'"count":\d+', number.encode(), path.read_bytes()))
    with pytest.raises(FormatError, match="Input should be"):
        Dataset.load(dataset.root)


@pytest.mark.parametrize("key", ["definition", "workload"])
def test_counts_of_a_workload_that_is_not_there_are_refused(dataset: Dataset, key: str) -> None:
    path = dataset.root / "counts.jsonl"
    line = orjson.loads(path.read_bytes().splitlines()[0])
    path.write_bytes(orjson.dumps({**line, key: "other"}) + b"\n")
    with pytest.raises(FormatError, match="has no Workload"):
        Dataset.load(dataset.root)


def test_a_definition_that_is_there_twice_is_refused(dataset: Dataset) -> None:
    shutil.copytree(dataset.root / "definitions/take", dataset.root / "definitions/taken")
    with pytest.raises(FormatError, match="name: take_n4 is there twice"):
        Dataset.load(dataset.root)


def test_an_evaluated_trace_is_no_workload(dataset: Dataset) -> None:
    one = trace.Trace(definition="take_n4", solution="s", workload=WORKLOAD)
    trace.write(dataset.root / "workloads/take/take_n4.jsonl", [one])
    with pytest.raises(FormatError, match="u1: a Workload has no solution"):
        Dataset.load(dataset.root)


def test_a_dataset_without_counts_has_no_file_of_them(tmp_path: Path) -> None:
    write_dataset(tmp_path, [DEFINITION], {}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["definitions"]
    assert Dataset.load(tmp_path).counts == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"axes": {}}, "axes: M has no size"),
        ({"axes": {"M": 3, "P": 1}}, "axes.P: take_n4 has no such axis"),
        ({"axes": {"M": 3, "N": 5}}, "axes.N: 5, but it is 4 in every Workload"),
        ({"inputs": {k: v for k, v in WORKLOAD.inputs.items() if k != "rows"}}, "inputs: rows is missing"),
        ({"inputs": {**WORKLOAD.inputs, "z": RandomInput()}}, "inputs.z: take_n4 has no such input"),
        (
            {"inputs": {**WORKLOAD.inputs, "scale": RandomInput()}},
            "inputs.scale: a scalar is given by its value, not as random",
        ),
        ({"inputs": {**WORKLOAD.inputs, "x": ScalarInput(value=1)}}, "inputs.x: a tensor, but given as a scalar"),
        ({"inputs": {**WORKLOAD.inputs, "scale": ScalarInput(value=True)}}, "inputs.scale: True is no float32"),
        ({"inputs": {**WORKLOAD.inputs, "count": ScalarInput(value=1.5)}}, "inputs.count: 1.5 is no int32"),
    ],
)
def test_a_workload_that_is_no_instance_is_told_why(change: dict[str, object], reason: str) -> None:
    assert changed(**change) == [reason]


def test_a_workload_may_repeat_a_constant_axis_and_leave_out_an_optional_input() -> None:
    assert changed(axes={"M": 3, "N": 4}) == []


@pytest.mark.parametrize("value", [True, 1, 1.0, -0.5, 2**62])
def test_a_scalar_keeps_its_type(value: float) -> None:
    given_ = ScalarInput.model_validate({"type": "scalar", "value": value})
    assert (type(given_.value), given_.value) == (type(value), value)


@pytest.mark.parametrize("value", [None, "1", [1], float("nan"), float("inf")])
def test_what_is_no_scalar_in_json_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="value"):
        ScalarInput.model_validate({"type": "scalar", "value": value})

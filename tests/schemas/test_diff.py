"""`kcap diff`: what only one has, what both have in other numbers, and an exit code that says it."""

from __future__ import annotations

import orjson
import pytest
import torch

from kcap.schemas.flashinfer.dataset import WorkloadCount, blob_path, write_dataset
from kcap.schemas.flashinfer.definition import (
    AxisConst,
    AxisVar,
    Definition,
    DefinitionTensor,
    RandomInput,
    SafetensorsInput,
    Workload,
)
from kcap.schemas.recording.recording import Argument, Call, Count, Launch, Metadata, write_recording
from kcap.schemas.recording.values import TensorSpec


def call(operator, *counts, size=4, **more):
    argument = Argument(value=TensorSpec((size,), "float32"))
    return Call(id=0, operator=operator, args=[argument], counts=list(counts), **more)


def decode(count, **more):
    return Count(phase="decode", count=count, **more)


@pytest.fixture
def compare(tmp_path, kcap):
    """Compares Recordings of these Calls; gives the exit code and the JSON."""

    def run(a, b):
        for name, calls in (("a", a), ("b", b)):
            write_recording(tmp_path / name, Metadata(), [c.model_copy(update={"id": i}) for i, c in enumerate(calls)])
        done = kcap("diff", tmp_path / "a", tmp_path / "b", "--json")
        return done.code, orjson.loads(done.out)

    return run


def test_order_and_numbers_of_calls_do_not_matter(compare):
    a, b = call("aten::relu", decode(3)), call("aten::relu", decode(3), size=8)
    code, diff = compare([a, b], [b, a])
    assert (code, diff["equal"]) == (0, True)


def test_calls_that_only_one_has_are_named(compare):
    both = call("aten::relu", decode(3))
    code, diff = compare([both, call("aten::mm", decode(1))], [both, call("aten::relu", decode(2), size=8)])
    assert (code, diff["equal"]) == (1, False)
    assert [entry["name"] for entry in diff["only_a"]] == ["aten::mm"]
    assert [(entry["name"], entry["detail"]) for entry in diff["only_b"]] == [("aten::relu", "f32[8]")]
    assert diff["changed"] == []


def test_counts_differ_by_phase_rank_and_mode_though_their_sum_does_not(compare):
    code, diff = compare([call("aten::relu", decode(3))], [call("aten::relu", decode(2), decode(1, mode="graph"))])
    assert code == 1
    assert diff["changed"][0]["a"] == {"decode 0 eager": 3}
    assert diff["changed"][0]["b"] == {"decode 0 eager": 2, "decode 0 graph": 1}
    assert diff["names"] == []


def test_a_kernel_whose_operators_one_does_not_tell_differs(compare):
    told, lacking = (
        call("triton::add", decode(2), launch=Launch(kernel="k.py", function="add", fragment=file))
        for file in ("f.txt", None)
    )
    status, found = compare([told], [lacking])
    assert (status, found["equal"]) == (1, False)
    assert [changed["fields"] for changed in found["changed"]] == [["fragment"]]
    assert compare([told], [told])[0] == 0


def test_operators_are_summed_with_their_shares(compare):
    a = [call("aten::relu", decode(1)), call("aten::relu", decode(1), size=8), call("aten::mm", decode(2))]
    b = [call("aten::relu", decode(6)), call("aten::mm", decode(2))]
    _, diff = compare(a, b)
    assert diff["names"] == [{"name": "aten::relu", "a": 2, "b": 6, "a_share": 0.5, "b_share": 0.75}]
    assert diff["totals"] == {"a": 4, "b": 8}


def test_a_region_and_a_kernel_of_one_signature_are_two_and_regions_no_part_of_the_total(compare):
    a = [call("vllm::attention", decode(3), kind="region")]
    code, diff = compare(a, [call("vllm::attention", decode(3))])
    assert (code, diff["totals"]) == (1, {"a": 0, "b": 3})
    assert len(diff["only_a"]) == len(diff["only_b"]) == 1


def test_the_table_tells_the_same(tmp_path, kcap):
    for name, count in (("a", 3), ("b", 5)):
        write_recording(tmp_path / name, Metadata(), [call("aten::relu", decode(count))])
    done = kcap("diff", tmp_path / "a", tmp_path / "b")
    assert (done.code, "decode 0 eager 3 → 5" in done.out, "+2" in done.out) == (1, True, True)
    same = kcap("diff", tmp_path / "a", tmp_path / "a")
    assert (same.code, same.out) == (0, "equal: 3 invocations each\n")


def test_trace_files_are_compared_too(tmp_path, kcap):
    for name, count in (("a", 3), ("b", 5)):
        (tmp_path / f"{name}.txt").write_text(f"Operator: aten.relu.default\ncnt: {count}, ((T([4], f32),), {{}})\n")
    assert kcap("diff", tmp_path / "a.txt", tmp_path / "b.txt").code == 1
    assert kcap("diff", tmp_path / "a.txt", tmp_path / "a.txt").code == 0


def dataset(root, n=4, uuids=("u",), count=5, m=1, held=None):
    tensor = DefinitionTensor(shape=["m", "n"], dtype="bfloat16")
    axes = {"m": AxisVar(), "n": AxisConst(value=n)}
    reference = "def run(x):\n    return x\n"
    entry = Definition(
        name="id", op_type="id", axes=axes, inputs={"x": tensor}, outputs={"y": tensor}, reference=reference
    )
    x = RandomInput() if held is None else SafetensorsInput(path=blob_path(entry, uuids[0]), tensor_key="x")
    workloads = [Workload(uuid=uuid, axes={"m": m}, inputs={"x": x}) for uuid in uuids]
    blobs = {} if held is None else {uuids[0]: {"x": torch.full((m, n), held, dtype=torch.bfloat16)}}
    counts = [
        WorkloadCount(definition="id", workload=u, operator="x::y", call=0, counts=[decode(count)]) for u in uuids
    ]
    write_dataset(root, [entry], {"id": workloads}, blobs, counts)
    return root


@pytest.mark.parametrize(
    ("other", "fields", "b"),
    [
        ({"n": 5}, ["axes"], {"decode 0 eager": 5, "workloads": 1}),
        ({"count": 6}, [], {"decode 0 eager": 6, "workloads": 1}),
        ({"uuids": ("u", "v")}, [], {"decode 0 eager": 5, "workloads": 2}),
        ({"m": 2}, ["workloads"], {"decode 0 eager": 5, "workloads": 1}),
        ({"held": 1.0}, ["workloads"], {"decode 0 eager": 5, "workloads": 1}),
    ],
)
def test_datasets_differ_in_content_counts_and_workloads(tmp_path, kcap, other, fields, b):
    done = kcap("diff", dataset(tmp_path / "a"), dataset(tmp_path / "b", **other), "--json")
    (changed,) = orjson.loads(done.out)["changed"]
    assert (done.code, changed["fields"], changed["b"]) == (1, fields, b)


def test_workloads_are_the_same_by_what_their_tensors_hold(tmp_path, kcap):
    first = dataset(tmp_path / "a", held=1.0)
    assert kcap("diff", first, dataset(tmp_path / "b", held=1.0, uuids=("other",))).code == 0
    assert kcap("diff", first, dataset(tmp_path / "c", held=2.0)).code == 1


def test_what_cannot_be_read_does_not_just_differ(tmp_path, kcap, recording):
    with (recording / "calls.jsonl").open("a") as calls:
        calls.write("{")
    done = kcap("diff", recording, recording)
    assert (done.code, "calls.jsonl:" in done.err) == (2, True)


def test_views_are_compared_and_are_no_part_of_the_total(compare):
    views = [call("aten::view", decode(count)).model_copy(update={"work": False}) for count in (3, 4)]
    _, diff = compare([views[0], call("aten::relu", decode(1))], [views[1]])
    assert diff["totals"] == {"a": 1, "b": 0} and len(diff["changed"]) == 1


def test_a_dataset_and_a_recording_are_not_compared(tmp_path, kcap, recording):
    done = kcap("diff", dataset(tmp_path / "a"), recording)
    assert (done.code, "with a dataset only" in done.err) == (2, True)

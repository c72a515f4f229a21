"""Datasets merged: equal Definitions and Workloads join, counts add, and what differs under one name is refused."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap.errors import CallError
from kcap.schemas.diff import diff_datasets
from kcap.schemas.flashinfer.dataset import Dataset, WorkloadCount, blob_path, invocations, write_dataset
from kcap.schemas.flashinfer.definition import (
    AxisConst,
    AxisVar,
    Definition,
    DefinitionTensor,
    RandomInput,
    SafetensorsInput,
    Workload,
)
from kcap.schemas.flashinfer.trace import Trace
from kcap.schemas.flashinfer.trace import write as write_traces
from kcap.schemas.merge.datasets import merge_datasets
from kcap.schemas.recording.records import Count

TENSOR = DefinitionTensor(shape=["m", "n"], dtype="bfloat16")


def definition(name="add", n=4, tags=("status:draft",)):
    axes = {"m": AxisVar(), "n": AxisConst(value=n)}
    reference = "def run(x):\n    return x + 1\n"
    return Definition(
        name=name,
        op_type="add",
        axes=axes,
        inputs={"x": TENSOR},
        outputs={"y": TENSOR},
        reference=reference,
        tags=[*tags],
    )


def workload(uuid, m=2):
    return Workload(uuid=uuid, axes={"m": m}, inputs={"x": RandomInput()})


def counted(uuid, count, call=0, name="add"):
    return WorkloadCount(
        definition=name, workload=uuid, operator="aten::add", call=call, counts=[Count(phase="decode", count=count)]
    )


def dataset(definitions, workloads, counts, root):
    return Dataset(
        root,
        {one.name: one for one in definitions},
        {name: list(given) for name, given in workloads.items()},
        counts=counts,
    )


@st.composite
def datasets(draw, root):
    names = draw(st.lists(st.sampled_from(["add", "sub"]), unique=True))
    given = {name: draw(st.lists(st.sampled_from("uvw"), unique=True, min_size=1)) for name in names}
    calls = iter(range(100))
    counts = []
    for name, uuids in given.items():
        for held in draw(st.lists(st.sets(st.sampled_from(uuids), min_size=1), max_size=3)):
            call, number = next(calls), draw(st.integers(1, 99))
            counts += [counted(uuid, number, call, name) for uuid in sorted(held)]
    workloads = {name: [workload(uuid) for uuid in uuids] for name, uuids in given.items()}
    return dataset([definition(name) for name in names], workloads, counts, root)


def content(one):
    calls = {}
    for line in one.counts:
        calls.setdefault((line.definition, line.call), []).append((line.workload, repr(line.counts)))
    return (
        sorted(one.definitions),
        {name: sorted(w.uuid for w in given) for name, given in one.workloads.items()},
        sorted((name, sorted(lines)) for (name, _), lines in calls.items()),
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("sets")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_merging_is_the_identity_of_one_and_associative_and_commutative(root, data):
    a, b, c = (data.draw(datasets(root)) for _ in range(3))

    def merged(*several):
        return merge_datasets(root, several)

    assert merged(a) == a
    assert content(merged(a, b)) == content(merged(b, a))
    assert content(merged(merged(a, b), c)) == content(merged(a, merged(b, c))) == content(merged(a, b, c))
    summed = Counter()
    for one in (a, b, c):
        summed.update(invocations(one.counts))
    assert invocations(merged(a, b, c).counts) == +summed
    assert diff_datasets(a, a).equal


def test_calls_of_other_recordings_keep_apart_under_one_number(root):
    a = dataset([definition()], {"add": [workload("u")]}, [counted("u", 5, call=3)], root)
    b = dataset([definition()], {"add": [workload("v", m=9)]}, [counted("v", 7, call=3)], root)
    whole = merge_datasets(root, [a, b])
    assert invocations(whole.counts) == {"add": 12}
    assert len({line.call for line in whole.counts}) == 2


def test_other_content_under_one_name_is_refused_by_name(root):
    a = dataset([definition(), definition("same")], {}, [], root)
    b = dataset([definition(n=5), definition("same")], {}, [], root)
    with pytest.raises(CallError, match="one name: add: rename"):
        merge_datasets(root, [a, b])
    c = dataset([definition()], {"add": [workload("u", m=3)]}, [], root)
    d = dataset([definition()], {"add": [workload("u", m=4)]}, [], root)
    with pytest.raises(CallError, match="add u"):
        merge_datasets(root, [c, d])


def test_the_order_of_inputs_is_content(root):
    def ordered(*names):
        one = definition().model_copy(update={"inputs": dict.fromkeys(names, TENSOR)})
        return dataset([one], {}, [], root)

    with pytest.raises(CallError):
        merge_datasets(root, [ordered("x", "z"), ordered("z", "x")])


def test_tags_join_and_a_definition_verified_once_is_verified(root):
    a = dataset([definition(tags=["model:a", "status:draft"])], {}, [], root)
    b = dataset([definition(tags=["model:b", "status:verified"])], {}, [], root)
    whole = merge_datasets(root, [a, b])
    assert whole.definitions["add"].tags == ["model:a", "model:b", "status:verified"]


def test_the_command_joins_blobs_solutions_and_traces(kcap, tmp_path):
    import torch

    for name, uuids in (("a", "uv"), ("b", "vw")):
        given = [
            Workload(
                uuid=uuid,
                axes={"m": 1},
                inputs={"x": SafetensorsInput(path=blob_path(definition(), uuid), tensor_key="x")},
            )
            for uuid in uuids
        ]
        blobs = {uuid: {"x": torch.full((1, 4), float(ord(uuid)))} for uuid in uuids}
        write_dataset(
            tmp_path / name, [definition()], {"add": given}, blobs, [counted(u, 5, i) for i, u in enumerate(uuids)]
        )
        traces = tmp_path / name / "traces" / "someone" / "add"
        traces.mkdir(parents=True)
        write_traces(traces / "add.jsonl", [Trace(definition="add", workload=one) for one in given])
    done = kcap("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "c")
    assert done.code == 0, done.err
    assert len(list((tmp_path / "c").rglob("*.safetensors"))) == 3
    assert len((tmp_path / "c" / "traces" / "someone" / "add" / "add.jsonl").read_text().splitlines()) == 3


def one_with_a_trace(root, uuid):
    """A dataset of one Workload; its Traces end without a line break."""
    write_dataset(root, [definition()], {"add": [workload(uuid)]}, {})
    path = root / "traces" / "someone" / "add" / "add.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(Trace(definition="add", workload=workload(uuid)).line().rstrip())
    return root


def test_lines_of_traces_stay_lines_where_a_file_does_not_end_in_one(kcap, tmp_path):
    given = [one_with_a_trace(tmp_path / name, name) for name in "ab"]
    assert kcap("merge", *given, "-o", tmp_path / "c").code == 0
    assert [trace.workload.uuid for trace in Dataset.load(tmp_path / "c").traces["add"]] == ["a", "b"]


def test_a_link_to_a_file_of_another_kind_is_not_copied(kcap, tmp_path):
    (tmp_path / "secret").write_text("key")
    root = one_with_a_trace(tmp_path / "a", "a")
    (root / "solutions").mkdir()
    for name in ("solutions/x", "traces/x.txt"):
        (root / name).symlink_to(tmp_path / "secret")
    assert kcap("merge", root, "-o", tmp_path / "c").code == 0
    assert not any(path.name.startswith("x") for path in (tmp_path / "c").rglob("*"))


def test_a_blob_that_is_no_safetensors_file_is_not_copied(kcap, tmp_path):
    given = SafetensorsInput(path="secret", tensor_key="x")
    one = Workload(uuid="u", axes={"m": 1}, inputs={"x": given})
    write_dataset(tmp_path / "a", [definition()], {"add": [one]}, {})
    (tmp_path / "a" / "secret").write_text("key")
    done = kcap("merge", tmp_path / "a", "-o", tmp_path / "c")
    assert (done.code, "not a readable safetensors file" in done.err) == (1, True)
    assert not (tmp_path / "c").exists()


def test_blobs_that_differ_under_one_name_are_refused(kcap, tmp_path):
    import torch

    for name in ("a", "b"):
        given = SafetensorsInput(path=blob_path(definition(), "u"), tensor_key="x")
        one = Workload(uuid="u", axes={"m": 1}, inputs={"x": given})
        write_dataset(
            tmp_path / name, [definition()], {"add": [one]}, {"u": {"x": torch.full((1, 4), float(ord(name)))}}
        )
    done = kcap("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "c")
    assert (done.code, "different content" in done.err) == (2, True)
    assert not (tmp_path / "c").exists()

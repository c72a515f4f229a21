"""References on the random inputs that other benchmarks draw: no problem is exported that no Solution could pass."""

from __future__ import annotations

import orjson
import pytest
import torch
from bench_calls import reasons
from derived_calls import METADATA, call, linear
from safetensors.torch import load_file

from kcap.bench.check import draws
from kcap.bench.check.checker import Checker
from kcap.bench.exports.common.cases import BOUNDED
from kcap.bench.exports.flashinfer_bench import kept_counts
from kcap.replay.datasets.workloads import workload_weights
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.schemas.derive.derive import derive_calls
from kcap.schemas.flashinfer.dataset import WorkloadCount
from kcap.schemas.recording.recording import Count, write_recording
from kcap.schemas.recording.values import TensorSpec

N = 600  # elements, of which half are outside of a square root's domain


def f32(*shape, storage=0):
    return TensorSpec(shape, "float32", storage=storage)


def i64(*shape, storage=0):
    return TensorSpec(shape, "int64", storage=storage)


SQRT = call(0, "aten::sqrt", self=f32(N))
LINEAR = linear(1, 7)
ACOSH = call(2, "aten::acosh", self=f32(N))  # not defined below 1
BATCH_NORM = call(
    4, "aten::batch_norm", input=f32(4, 8, 16), weight=f32(8, storage=1), bias=f32(8, storage=2),
    running_mean=f32(8, storage=3), running_var=f32(8, storage=4), training=False, momentum=0.1, eps=1e-5,
    cudnn_enabled=False,
)  # fmt: skip
DIVIDED = call(5, "aten::div.Tensor_mode", self=i64(N), other=i64(N, storage=1), rounding_mode="floor")
LOG_OF_FEW = call(6, "aten::log", self=f32(1))


def answer(one, integers=(-1024, 1023), tolerated=()):
    (kernel,) = derive_calls([one], METADATA).kernels
    request = {"definition": kernel.definition.name, "call": one.id, "sample": None, "seed": 0}
    checker = Checker([kernel], Rebuilder("cpu", "cpu", None))
    return checker.try_draws({**request, "target": "T", "integers": integers, "tolerated": tolerated}, None)


@pytest.mark.parametrize(
    ("one", "bounded"),
    [(LINEAR, []), (SQRT, ["self"]), (LOG_OF_FEW, ["self"]), (BATCH_NORM, ["running_var"]), (DIVIDED, ["other"])],
)
def test_only_the_inputs_that_need_it_are_bounded(one, bounded):
    found = answer(one)
    assert (found["status"], found.get("bounded")) == ("comparable", bounded)


def test_a_reference_that_no_draw_suits_is_refused_with_the_reason():
    found = answer(ACOSH)
    assert (found["status"], "returns nan" in found["reason"]) == ("refused", True)


def test_what_a_target_takes_for_equal_is_no_fault():
    few = call(0, "aten::masked_fill.Scalar", self=f32(N), mask=TensorSpec((N,), "bool", storage=1), value=-1e400)
    assert answer(few)["status"] == "refused"
    assert answer(few, tolerated=("-inf",))["bounded"] == []


def test_a_device_that_an_index_out_of_bounds_has_poisoned_is_given_up(monkeypatch):
    """The GPU tells of it late: when what the reference returned is looked at."""

    def poisoned(output):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(draws, "_not_finite", poisoned)
    found = answer(SQRT)
    assert (found["status"], found["poisoned"]) == ("refused", True)
    assert "device-side assert" in found["reason"]


def test_a_gpus_recording_is_exported_where_there_is_none(tmp_path, kcap):
    on_gpu = call(0, "aten::sqrt", self=TensorSpec((N,), "float32", device="cuda"))
    write_recording(tmp_path / "gpu.kcap", METADATA.model_copy(update={"layers_recorded": None}), [on_gpu])
    done = kcap("export", tmp_path / "gpu.kcap", "--to", "kernelbench", "-o", tmp_path / "out", "--allow-truncated")
    assert done.code == 0, done.err
    loss = orjson.loads((tmp_path / "out" / "loss.json").read_bytes())
    assert loss["exported"] == loss["total"] == on_gpu.total


def test_the_samples_that_a_call_keeps_stand_for_all_of_its_invocations():
    of_call = {"definition": "sqrt", "operator": "aten::sqrt", "call": 0, "samples": 3}
    counts = [WorkloadCount(**of_call, workload=name, counts=[Count(phase="decode", count=90)]) for name in "abc"]
    kept = kept_counts(counts, {"a", "c"})
    assert [(count.workload, count.samples) for count in kept] == [("a", 2), ("c", 2)]
    assert {name: weights["decode"] for (_, name), weights in workload_weights(kept).items()} == {"a": 45, "c": 45}
    assert kept_counts(counts, set("abc")) == counts


@pytest.fixture
def domains(tmp_path):
    path = tmp_path / "domains.kcap"
    write_recording(path, METADATA.model_copy(update={"layers_recorded": 32, "layers_model": 32}), [SQRT, ACOSH])
    return path


def check_loss(loss):
    assert "returns nan" in reasons(loss)["aten::acosh"]
    assert [(one["operator"], one["count"]) for one in loss["reduced"] if one["reason"] == BOUNDED] == [
        ("aten::sqrt", 6)
    ]


def test_flashinfer_bench_gets_finite_numbers(domains, exported):
    data = pytest.importorskip("flashinfer_bench.data")
    utils = pytest.importorskip("flashinfer_bench.bench.utils")
    output, loss = exported(domains, "flashinfer-bench")
    check_loss(loss)
    read = data.TraceSet.from_path(str(output))
    ((name, definition),) = read.definitions.items()
    (trace,) = read.workloads[name]
    stored = utils.load_safetensors(definition, trace.workload, output)
    inputs = utils.gen_inputs(definition, trace.workload, "cpu", stored)
    scope = {}
    exec(definition.reference, scope)
    assert torch.isfinite(scope["run"](*inputs)).all()


def test_sol_execbench_reads_stored_inputs_inside_the_domain(domains, exported):
    output, loss = exported(domains, "sol-execbench")
    check_loss(loss)
    (lines,) = (path.read_bytes().splitlines() for path in output.glob("L1/*/workload.jsonl"))
    ((given,),) = (orjson.loads(line)["inputs"].values() for line in lines)
    assert load_file(output / given["path"])[given["tensor_key"]].min() > 0


def test_kernelbench_draws_new_inputs_inside_the_domain(domains, exported):
    output, loss = exported(domains, "kernelbench")
    check_loss(loss)
    (path,) = output.glob("level1/*.py")
    scope = {}
    exec(path.read_text(), scope)
    (first,), (second,) = scope["get_inputs"](), scope["get_inputs"]()
    assert torch.isfinite(scope["Model"]()(first)).all()
    assert not torch.equal(first, second)


def test_without_checks_nothing_is_run(domains, exported):
    _, loss = exported(domains, "kernelbench", "--no-check")
    assert "aten::acosh" not in reasons(loss)

"""From a Recording to Definitions with Workloads: nothing is lost in silence, and equal things have equal names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from derived_calls import METADATA, VOCABULARY, call, embedding, floats, ints, linear, ranged

from kcap.bench.contents import Contents, open_contents
from kcap.bench.problems import Problems, problems_of
from kcap.schemas.flashinfer.definition import SafetensorsInput, check_workload
from kcap.schemas.recording.recording import SampledTensor, write_recording
from kcap.schemas.recording.values import Drift, Group, TensorSpec, Value
from kcap.show.estimate import TYPICAL_GPU, estimated_times


@pytest.fixture
def made(tmp_path: Path):
    """Writes these Calls and Samples, and gives the Problems made of them."""

    def make(calls, samples=()) -> tuple[Contents, Problems]:
        write_recording(tmp_path / "a.kcap", METADATA, calls, samples=samples)
        contents = open_contents(tmp_path / "a.kcap", False)
        return contents, problems_of(contents)

    return make


def test_calls_that_differ_in_a_variable_axis_are_workloads_of_one_definition(made) -> None:
    _, found = made([linear(0, 1), linear(1, 7, count=2)])
    (problem,) = found.problems
    assert problem.definition.name == "gemm_bf16_n16_k32"
    assert {workload.axes["M"] for workload in problem.workloads.values()} == {1, 7}
    assert problem.total == 8


def test_every_workload_is_an_instance_of_its_definition(made) -> None:
    _, found = made([linear(0, 1), embedding(1, 5)], [ranged(1, 3, 9)])
    for problem in found.problems:
        assert [reason for w in problem.workloads.values() for reason in check_workload(problem.definition, w)] == []


def test_stage_and_model_are_tags(made) -> None:
    _, found = made([linear(0, 1), linear(1, 7)])
    tags = {"model:llama-3.1-8b", "stage:decode", "stage:prefill", "status:draft"}
    assert tags <= set(found.problems[0].definition.tags)


def test_ids_that_were_not_kept_are_drawn_within_their_range_and_written(made) -> None:
    _, found = made([embedding(0, 50)], [ranged(0, 3, 9)])
    (problem,) = found.problems
    (workload,) = problem.workloads.values()
    (stored,) = [one for one in workload.inputs.values() if isinstance(one, SafetensorsInput)]
    values = problem.blobs[workload.uuid][stored.tensor_key]
    assert 3 <= int(values.min()) <= int(values.max()) <= 9 < VOCABULARY


def test_a_sample_whose_file_is_missing_loses_its_call_alone(made) -> None:
    missing = ranged(1, 3, 9).model_copy(update={"tensors": {"1": SampledTensor(file="a.safetensors")}})
    contents, found = made([linear(0, 1), embedding(1, 5)], [missing])
    assert [problem.definition.op_type for problem in found.problems] == ["gemm"]
    (lost,) = found.ledger.loss("any", contents.total).lost
    assert lost.operator == "aten::embedding" and "a.safetensors: not a readable" in lost.reason
    assert estimated_times(contents.recording, TYPICAL_GPU).keys() == {0, 1}


def test_samples_that_differ_are_workloads_that_share_the_counts_of_their_call(made) -> None:
    _, found = made([embedding(0, 50)], [ranged(0, 3, 9), ranged(0, 90, 99), ranged(0, 3, 9)])
    (problem,) = found.problems
    assert len(problem.workloads) == len(problem.counts) == 2
    assert {count.samples for count in problem.counts} == {2}
    assert problem.total == 6


def test_a_sample_without_values_stands_back_where_another_has_some(made) -> None:
    bare = ranged(0, 3, 9).model_copy(update={"tensors": {}})
    _, found = made([embedding(0, 50)], [bare, ranged(0, 3, 9)])
    assert [count.samples for count in found.problems[0].counts] == [1]


def test_ids_have_the_dtype_that_they_were_recorded_with(made) -> None:
    narrow = embedding(0, 50)
    narrow.args[1] = narrow.args[1].model_copy(update={"value": TensorSpec((50,), "int32", storage=1)})
    _, found = made([narrow], [ranged(0, 3, 9)])
    (blob,) = found.problems[0].blobs.values()
    assert {tensor.dtype for tensor in blob.values()} == {torch.int32}


def test_the_same_workload_has_the_same_id_in_another_recording(made) -> None:
    first = made([linear(0, 1)])[1].problems[0].workloads
    again = made([linear(0, 7), linear(1, 1)])[1].problems[0].workloads
    assert set(first) < set(again)


def test_indices_that_are_drawn_are_the_same_every_time(made) -> None:
    calls, samples = [embedding(0, 50), embedding(1, 9)], [ranged(0, 3, 99), ranged(1, 3, 99)]
    first, again = (list(made(calls, samples)[1].problems[0].workloads) for _ in range(2))
    assert first == again and len(first) == 2


def test_an_integer_input_of_a_library_that_was_not_sampled_is_lost_and_said(made) -> None:
    scattered = call(0, "_C::rotary_embedding", positions=ints(4), query=floats(4, 64), key=floats(4, 64, storage=1))
    contents, found = made([scattered, linear(1, 1)])
    loss = found.ledger.loss("x", contents.total)
    assert loss.exported == 6 and sum(lost.count for lost in loss.lost) == 6


def test_a_drifting_number_without_a_sample_is_lost_and_said(made) -> None:
    contents, found = made([call(0, "aten::mul.Scalar", self=floats(4), other=Drift("float")), linear(1, 1)])
    assert [lost.operator for lost in found.ledger.loss("x", contents.total).lost] == ["aten::mul.Scalar"]


def test_a_region_stands_for_what_no_family_knows_in_it(made) -> None:
    arguments = {"x": floats(4, 32), "weight": floats(32, storage=1), "epsilon": 1e-6}
    region = call(0, "vllm_ir::rms_norm", **arguments).model_copy(update={"kind": "region"})
    inside = call(1, "aten::rsqrt", self=floats(4, 1)).model_copy(update={"parent": region.operator})
    alone = call(2, "aten::rsqrt", self=floats(4, 1))
    _, found = made([region, inside, alone])
    names = {problem.definition.name: problem.total for problem in found.problems}
    assert names.pop("rmsnorm_eps1e-06_h32") == 6
    assert list(names.values()) == [6], "the same operator outside counts on its own"
    assert found.derived is not None and found.derived.family_of()[1] == "rmsnorm"


def test_a_region_of_which_a_family_knows_some_calls_only_stands_for_none(made) -> None:
    arguments = {"x": floats(4, 32), "weight": floats(32, storage=1), "epsilon": 1e-6}
    known, other = call(0, "vllm_ir::rms_norm", **arguments), call(1, "vllm_ir::rms_norm", **arguments, variance_size=8)
    inside = call(2, "aten::rsqrt", self=floats(4, 1)).model_copy(update={"parent": known.operator})
    _, found = made([*(one.model_copy(update={"kind": "region"}) for one in (known, other)), inside])
    assert [problem.definition.op_type for problem in found.problems] == ["rsqrt"]


def test_a_region_around_another_is_not_exported_beside_it(made) -> None:
    arguments = {"x": floats(4, 32), "weight": floats(32, storage=1), "epsilon": 1e-6}
    outer = call(0, "vllm_custom_op::gemma_rms_norm", **{**arguments, "variance_epsilon": 1e-6})
    inner = call(1, "vllm_ir::rms_norm", **arguments).model_copy(update={"parent": outer.operator})
    regions = [one.model_copy(update={"kind": "region"}) for one in (outer, inner)]
    add, root = call(2, "aten::neg", self=floats(4)), call(3, "aten::rsqrt", self=floats(4, 1))
    parents = ((add, outer), (root, inner))
    _, found = made([*regions, *(one.model_copy(update={"parent": around.operator}) for one, around in parents)])
    assert sorted(problem.definition.op_type for problem in found.problems) == ["neg", "rmsnorm"]


def test_what_lies_in_a_region_without_a_workload_is_lost(made) -> None:
    arguments = {"x": floats(4, 32), "weight": floats(32, storage=1), "epsilon": 1e-6}
    region = call(
        0,
        "vllm_custom_op::gemma_rms_norm",
        x=TensorSpec((4, 32), "bfloat16", offset=None),
        weight=arguments["weight"],
        variance_epsilon=1e-6,
    )
    inside = call(1, "aten::rsqrt", self=floats(4, 1)).model_copy(update={"parent": region.operator})
    contents, found = made([region.model_copy(update={"kind": "region"}), inside])
    loss = found.ledger.loss("x", contents.total)
    assert not found.problems and loss.exported == 0 and not loss.reduced


def test_a_region_around_a_kernel_that_a_family_knows_is_not_exported_beside_it(made) -> None:
    arguments = {"x": floats(4, 32), "weight": floats(32, storage=1), "epsilon": 1e-6}
    region = call(0, "vllm_ir::rms_norm", **arguments).model_copy(update={"kind": "region"})
    kernel = call(
        1,
        "_C::rms_norm",
        5,
        result=floats(4, 32),
        input=floats(4, 32, storage=1),
        weight=floats(32, storage=2),
        epsilon=1e-6,
    )
    _, found = made([region, kernel.model_copy(update={"parent": region.operator})])
    assert [problem.total for problem in found.problems] == [5]


@pytest.mark.parametrize("kernel", ["awq_gemm", "machete_mm"])
def test_packed_weights_are_left_to_who_reads_a_workload(made, kernel: str) -> None:
    """They would be most of a dataset's bytes, and any bits are some."""
    m, k, n, group = 3, 256, 64, 128
    words, scale = (
        (k, n // 8) if kernel == "awq_gemm" else (k // 8, n),
        TensorSpec((k // group, n), "float16", storage=2),
    )
    weight, rows = TensorSpec(words, "int32", storage=1), TensorSpec((m, k), "float16")
    zeros = TensorSpec((k // group, n // 8), "int32", storage=3)
    awq = {"_in_feats": rows, "_kernel": weight, "_scaling_factors": scale, "_zeros": zeros, "split_k_iters": 8}
    machete = {"A": rows, "B": weight, "b_type": 4 << 8 | 8 << 17 | 1 << 50, "group_scales": scale, "group_size": group}
    _, found = made([call(0, f"_C::{kernel}", **(awq if kernel == "awq_gemm" else machete))])
    (problem,) = found.problems
    assert problem.definition.op_type == "weight_only_gemm"
    (workload,) = problem.workloads.values()
    assert {name: given.type for name, given in workload.inputs.items()} == dict.fromkeys(workload.inputs, "random")
    assert not problem.blobs


def test_integers_that_a_collective_moves_need_no_sample(made) -> None:
    """As the numbers of the experts that were chosen, which ranks tell each other."""

    def rows(count: int, *dtypes: str) -> list[Value]:
        return [TensorSpec((count, 8), dtype, storage=number) for number, dtype in enumerate(dtypes)]

    both = {"output_tensor": rows(6, "bfloat16", "int32"), "input_tensor": rows(3, "bfloat16", "int32")}
    _, found = made([call(0, "pynccl::all_gather", **both, group=Group(2, 0))])
    (problem,) = found.problems
    (workload,) = problem.workloads.values()
    assert {name: given.type for name, given in workload.inputs.items()} == {"inputs_0": "random", "inputs_1": "random"}


def test_a_rule_finds_arguments_that_nothing_names(made) -> None:
    """Those of a function that SGLang compiles at run time: which rows it writes is the rule's."""
    values = (floats(50, 96), ints(4, storage=1), floats(4, 64, storage=2), floats(4, 32, storage=3), 8)
    _, found = made([call(0, "tvm::set_mla_kv_buffer", **{f"arg{n}": value for n, value in enumerate(values)})])
    (problem,) = found.problems
    (workload,) = problem.workloads.values()
    assert workload.axes == {"num_tokens": 4, "num_pages": 4} and workload.inputs["slot_mapping"].type == "safetensors"

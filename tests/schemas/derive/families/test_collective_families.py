"""Collectives: the Definition of one rank's call, and the calls whose group is not known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn

from kcap.replay.datasets.reference import compile_reference
from kcap.schemas.derive.cost import Cost, CostInputs, cost_function_for
from kcap.schemas.derive.families import recognize
from kcap.schemas.derive.invocation import Invocation
from kcap.schemas.recording.values import Group

TP2 = Group(size=2, rank=0)


def test_reference_sums_the_ranks():
    for ranks, tokens, hidden in ((2, 1, 64), (4, 7, 32), (8, 16, 128), (3, 5, 8), (2, 64, 256)):
        kernel = kernel_of("vllm::all_reduce", tensor=randn(tokens, hidden), group_name=Group(ranks, 1))
        stacked = randn(ranks, tokens, hidden, seed=ranks)
        total = compile_reference(kernel.definition().reference, kernel.name)(stacked)
        assert total.dtype == torch.bfloat16
        torch.testing.assert_close(total, stacked.double().sum(0).bfloat16())


def test_ranks_that_hold_the_same_make_a_multiple():
    x = randn(5, 64)

    def run(fa: Any, inp: torch.Tensor, out: torch.Tensor, reg_buffer: int, reg_buffer_sz_bytes: int) -> None:
        out.copy_(2 * inp)

    buffer = {"reg_buffer": 0, "reg_buffer_sz_bytes": 0}
    kernel = agrees("_C_custom_ar::all_reduce", run, fa=TP2, inp=x, out=torch.empty_like(x), **buffer)
    assert kernel.touched is not None and kernel.touched() == 2 * 5 * 64 * 2


def test_names_of_llama_on_two_ranks():
    x = torch.empty(8, 4096, dtype=torch.bfloat16, device="meta")
    definition = checked(kernel_of("vllm::all_reduce", tensor=x, group_name=TP2))
    assert definition.name == "all_reduce_ws2_h4096" and definition.op_type == "comm"
    assert definition.inputs["inputs"].shape == ["world_size", "num_tokens", "hidden_size"]
    assert definition.var_axes == ["num_tokens"]
    assert kernel_of("_C::shm_allreduce", handle=Group(2, 1, "tp"), data=x).name == definition.name
    assert kernel_of("_c10d_functional::all_reduce", input=x, reduce_op="sum", group_name=TP2).name == definition.name


def test_groups_of_unknown_size_and_other_operations_are_declined():
    x = torch.empty(8, 4096, dtype=torch.bfloat16, device="meta")
    assert declined("vllm::all_reduce", tensor=x, group_name="tp:0")
    assert declined("_C::shm_allreduce", handle=0, data=x)
    assert declined("_C_custom_ar::all_reduce", fa=288115136, inp=x, out=x, reg_buffer=0, reg_buffer_sz_bytes=0)
    assert declined("_c10d_functional::all_reduce", input=x, reduce_op="bor", group_name=TP2)
    whole = torch.empty(8, 4096, dtype=torch.int64, device="meta")
    assert declined("_c10d_functional::all_reduce", input=whole, reduce_op="avg", group_name=TP2)
    assert declined("_c10d_functional::all_reduce", input=whole.bool(), reduce_op="sum", group_name=TP2)


REDUCED = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "product": lambda stacked: stacked.prod(0),
    "max": lambda stacked: stacked.max(0).values,
    "min": lambda stacked: stacked.min(0).values,
}


@pytest.mark.parametrize("operation", REDUCED)
def test_each_operation_has_a_definition_of_its_own(operation: str) -> None:
    named = "" if operation == "sum" else f"_{operation}"
    for dtype in (torch.bfloat16, torch.float32, *([] if operation == "avg" else [torch.int64])):
        stacked = (100 * randn(3, 5, 8).double()).to(dtype) + (0 if dtype.is_floating_point else 1 << 40)
        result = REDUCED[operation](stacked.double() if dtype.is_floating_point else stacked).to(dtype)
        group = {"reduce_op": operation, "group_name": Group(3, 1)}
        kernel = kernel_of("_c10d_functional::all_reduce", input=stacked[0], **group)
        assert kernel.name.startswith(f"all_reduce{named}_") and not checked(kernel).written_inputs
        run = compile_reference(kernel.reference, kernel.name)
        torch.testing.assert_close(run(stacked), result)
        parts = stacked.reshape(3, 5, 8).repeat_interleave(3, 1)[:, :9]  # three for each of three ranks
        scattered = kernel_of("_c10d_functional::reduce_scatter_tensor", input=parts[0], group_size=3, **group)
        assert scattered.name.startswith(f"reduce_scatter{named}_")
        run = compile_reference(scattered.reference, scattered.name)
        wide = parts.double() if dtype.is_floating_point else parts
        torch.testing.assert_close(run(parts.reshape(3, 3, 3, 8), 1), REDUCED[operation](wide)[3:6].to(dtype))


def test_a_number_is_reduced_as_one_element() -> None:
    loss = torch.tensor(3.5)
    kernel = kernel_of("_c10d_functional::all_reduce", input=loss, reduce_op="sum", group_name=TP2)
    assert checked(kernel).name == "all_reduce_fp32_ws2_h1"
    run = compile_reference(kernel.reference, kernel.name)
    assert run(torch.tensor([[[1.0]], [[2.5]]])).tolist() == [[3.5]]


def test_what_a_gather_is_given_may_be_returned() -> None:
    """In one process it moves nothing: a Solution that returns it is as fast as the reference, and no faster."""
    x = randn(3, 8)
    gather = kernel_of("_C::shm_all_gather", handle=TP2, data=x, output=x.repeat(2, 1))
    assert checked(gather).written_inputs == {"inputs": "output"}
    given = {"inputs": torch.ones(2, 3, 8, dtype=torch.bfloat16)}
    reduce = kernel_of("vllm::all_reduce", tensor=x, group_name=TP2)
    cost = cost_function_for("comm")
    assert cost is not None and cost(CostInputs(checked(gather), given)) == Cost(), "no time is below its floor"
    assert cost(CostInputs(checked(reduce), given)).bytes == 3 * x.nbytes
    both = {"input_tensor": [x, x], "output_tensor": [x.repeat(2, 1)] * 2}
    together = kernel_of("pynccl::all_gather", group=TP2, **both)
    assert checked(together).written_inputs == {"inputs_0": "output_0", "inputs_1": "output_1"}


def test_gathered_parts_lie_one_after_the_other_by_rank_or_within_each_row():
    x, parts = randn(3, 8), randn(2, 3, 8, seed=1)
    by_row = parts.transpose(0, 1).reshape(3, 16)
    for dim, result in ((0, parts.reshape(6, 8)), (-1, by_row), (1, by_row)):
        call = Invocation("vllm::all_gather", {"tensor": x, "dim": dim, "world_size": 2, "group_name": TP2})
        call.result = result
        kernel = recognize(call)
        assert kernel is not None and kernel.name == "all_gather_ws2_h8"
        torch.testing.assert_close(kernel.outputs["output"].get(), parts)
        assert kernel.touched is not None and kernel.touched() == 3 * x.nbytes
    stacked = compile_reference(kernel.reference, kernel.name)(parts)
    torch.testing.assert_close(stacked, parts)
    assert checked(kernel_of("_C::shm_all_gather", handle=TP2, data=x, output=x.repeat(2, 1))).op_type == "comm"
    assert declined("vllm::all_gather", tensor=randn(2, 3, 8), dim=1, world_size=2, group_name=TP2)
    assert declined("_C::shm_all_gather", handle=0, data=x, output=x.repeat(2, 1))


def test_each_rank_gets_the_sum_of_its_part_of_the_rows_or_of_each_row():
    stacked = randn(2, 2, 3, 8)  # of two ranks, for two ranks
    sums = stacked.double().sum(0).bfloat16()
    for rank in (0, 1):
        for dim, x in ((0, stacked[rank].reshape(6, 8)), (-1, stacked[rank].transpose(0, 1).reshape(3, 16))):
            call = Invocation(
                "vllm::reduce_scatter", {"tensor": x, "dim": dim, "world_size": 2, "group_name": Group(2, rank)}
            )
            call.result = sums[rank]
            kernel = recognize(call)
            assert kernel is not None and kernel.name == "reduce_scatter_ws2_h8"
            torch.testing.assert_close(kernel.inputs["inputs"].get()[rank], stacked[rank])
            assert kernel.inputs["rank"].get() == rank
            torch.testing.assert_close(kernel.outputs["output"].get(), sums[rank])
            assert kernel.touched is not None and kernel.touched() == x.nbytes + x.nbytes // 2
            assert kernel.flops == 3 * 8
            run = compile_reference(checked(kernel).reference, kernel.name)
            torch.testing.assert_close(run(stacked, rank), sums[rank])


def test_a_scatter_of_what_is_no_sum_or_lies_in_between_is_declined():
    scatter = {"input": randn(6, 8), "group_size": 2, "group_name": TP2}
    named = kernel_of("_c10d_functional::reduce_scatter_tensor", reduce_op="sum", **scatter).name
    output = {"output": randn(3, 8), "input": scatter["input"], "group_name": TP2}
    assert named == kernel_of("sglang::reg_reduce_scatter_tensor", **output).name == "reduce_scatter_ws2_h8"
    assert declined("_c10d_functional::reduce_scatter_tensor", reduce_op="bor", **scatter)
    assert declined("vllm::reduce_scatter", tensor=randn(2, 4, 8), dim=1, world_size=2, group_name=TP2)


def test_the_engines_own_binding_of_nccl_gathers_and_scatters():
    x, whole = randn(3, 8), randn(6, 8)
    both = {"group": TP2, "input_tensor": x, "output_tensor": whole}
    gathered = checked(kernel_of("pynccl::all_gather", **both))
    assert gathered.name == kernel_of("_C::shm_all_gather", handle=TP2, data=x, output=whole).name
    scattered = {"group": TP2, "input_tensor": whole, "output_tensor": x}
    assert kernel_of("pynccl::reduce_scatter", op="sum", **scattered).name == "reduce_scatter_ws2_h8"
    assert declined("pynccl::reduce_scatter", op="max", **scattered)
    assert declined("pynccl::reduce_scatter", op="sum", sizes=[2, 4], **scattered)
    assert declined("pynccl::all_gather", sizes=[2, 4], **both)
    reduced = checked(kernel_of("pynccl::all_reduce", group=TP2, tensor=x, op="sum"))
    assert reduced.name == kernel_of("pynccl::outplace_all_reduce", group=TP2, in_tensor=x, op="sum").name
    assert reduced.name == "all_reduce_ws2_h8" and declined("pynccl::all_reduce", group=TP2, in_tensor=x, op="max")


def test_tensors_that_nccl_gathers_together_are_stacked_each():
    """As before a layer of experts: the tokens, and what was chosen for each."""
    parts = [randn(2, 3, 8), randn(2, 3, 4, seed=1).float(), torch.arange(24, dtype=torch.int32).reshape(2, 3, 4)]
    own, whole = [part[1] for part in parts], [part.reshape(6, -1) for part in parts]
    kernel = kernel_of("pynccl::all_gather", group=TP2, input_tensor=own, output_tensor=whole)
    assert kernel.name == "all_gather_ws2_h8_h4_fp32_h4_int32" and checked(kernel).var_axes == ["num_tokens"]
    for number, result in enumerate(compile_reference(kernel.reference, kernel.name)(*parts)):
        torch.testing.assert_close(result, parts[number])
        torch.testing.assert_close(kernel.outputs[f"output_{number}"].get(), parts[number])
    assert kernel.touched is not None and kernel.touched() == 3 * sum(x.nbytes for x in own)
    assert declined("pynccl::all_gather", group=TP2, input_tensor=[own[0], own[0][:2]], output_tensor=whole[:2])
    lists = {"input_tensor": own, "output_tensor": whole}
    assert declined("pynccl::all_gather", group=TP2, sizes=[[2, 4]] * 3, **lists)
    assert kernel_of("pynccl::all_gather", group=TP2, sizes=[None] * 3, **lists).name == kernel.name


def test_flashinfer_adds_a_residual_to_the_sum_and_norms_it():
    stacked, residual, weight = randn(2, 5, 16), randn(5, 16, seed=3), randn(16, seed=4)
    arguments = {"input": stacked[0], "residual_in": residual, "rms_gamma": weight, "rms_eps": 1e-5, "group": TP2}
    outputs = {"norm_out": torch.empty(5, 16).bfloat16(), "residual_out": torch.empty(5, 16).bfloat16()}
    kernel = kernel_of("flashinfer::allreduce_fusion", pattern=1, **arguments, **outputs)
    assert kernel.name == "all_reduce_fused_add_rmsnorm_ws2_h16" and checked(kernel).op_type == "comm"
    normed, added = compile_reference(kernel.reference, kernel.name)(stacked, residual, weight)
    truth = stacked.double().sum(0) + residual.double()
    torch.testing.assert_close(added, truth.bfloat16())
    expected = torch.nn.functional.rms_norm(truth, (16,), weight.double(), 1e-5)
    torch.testing.assert_close(normed, expected.bfloat16())
    assert kernel.outputs["output"].get() is outputs["norm_out"]
    gemma = kernel_of("flashinfer::allreduce_fusion", pattern=1, weight_bias=1.0, **arguments, **outputs)
    normed, _ = compile_reference(gemma.reference, gemma.name)(stacked, residual, weight)
    expected = torch.nn.functional.rms_norm(truth, (16,), 1.0 + weight.double(), 1e-5)
    torch.testing.assert_close(normed, expected.bfloat16())
    assert gemma.name == "all_reduce_gemma_fused_add_rmsnorm_ws2_h16"
    alone = kernel_of("flashinfer::allreduce_fusion", pattern=0, **arguments, output=torch.empty(5, 16).bfloat16())
    assert alone.name == "all_reduce_ws2_h16"
    assert declined("flashinfer::allreduce_fusion", pattern=2, **arguments, **outputs)
    assert declined("flashinfer::allreduce_fusion", pattern=1, weight_bias=0.5, **arguments, **outputs)
    assert declined("flashinfer::allreduce_fusion", pattern=1, **{**arguments, "group": None}, **outputs)

"""slot_list, kv_splits and softcap: against SGLang's Triton kernels, interpreted; valid inputs, what is declined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, launched, randn
from interpreted import Launcher, kernels

from kcap.replay.datasets.inputs import make_inputs
from kcap.replay.rebuild.memory import Target, build_inputs
from kcap.replay.rebuild.rebuild import apply_rule, resolve_integers
from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import CostInputs, cost_of_instance
from kcap.schemas.derive.families import cost_function_for, replay_rule_for
from kcap.schemas.flashinfer.definition import RandomInput, Workload
from kcap.schemas.recording.recording import Argument
from kcap.schemas.recording.values import TensorSpec

LIST = "triton::create_flashinfer_kv_indices_triton.s01234567"
SPLITS = "triton::get_num_kv_splits_triton.s01234567"
SOFTCAP = "triton::softcap_inplace_logits_kernel.s01234567"
Arguments = dict[str, Any]


@pytest.fixture(scope="module")
def launchers() -> dict[str, Launcher]:
    return kernels("sglang", *(f"kernels/ops/attention/{name}.py" for name in ("kv_indices", "metadata")))


def slot_list(**more: Any) -> Arguments:
    """Three requests of a table of five; the list begins and ends with what stays."""
    table = torch.randperm(5 * 700, generator=torch.Generator().manual_seed(1)).reshape(5, 700).to(torch.int32)
    return {
        "req_to_token_ptr": table,
        "req_pool_indices_ptr": torch.tensor([4, 0, 2]),
        "page_kernel_lens_ptr": torch.tensor([600, 0, 33]),
        "kv_indptr": torch.tensor([0, 600, 600, 633, 999], dtype=torch.int32),
        "kv_start_idx": None,
        "kv_indices_ptr": torch.full((700,), -7),
        "req_to_token_ptr_stride": 700,
        **more,
    }


def other_slots() -> torch.Tensor:
    """A slot of another cache for each of the table, or -1."""
    return torch.randperm(5 * 700, generator=torch.Generator().manual_seed(2)) - 1


@pytest.mark.parametrize("mapping", [None, other_slots()])
@pytest.mark.parametrize("first", [None, torch.tensor([100, 5, 0])])
def test_listed_slots_are_sglangs(
    launchers: dict[str, Launcher], first: torch.Tensor | None, mapping: torch.Tensor | None
) -> None:
    call = slot_list(kv_start_idx=first, token_mapping=mapping)
    call["req_to_token_ptr"][2, 7] = -1
    launcher = launchers["create_flashinfer_kv_indices_triton"]
    kernel = agrees(LIST, lambda **call: launcher[(3,)](**call), **call)
    words = ["slot_list", *(["from"] if first is not None else []), *(["mapped"] if mapping is not None else [])]
    assert kernel.name == "_".join(words)
    listed = call["kv_indices_ptr"]
    assert listed[633:].unique().tolist() == [-7] and listed[607] == -1 and int(listed[:633].min()) == -1
    inputs = {name: slot.get() for name, slot in kernel.inputs.items()}
    cost = cost_function_for("slot_list")
    assert cost is not None
    assert (
        cost(CostInputs(checked(kernel), inputs)).bytes
        == cost_of_instance(kernel).bytes
        == 633 * (4 + 8 * len([listed, *([mapping] if mapping is not None else [])]))
    )
    for change in ({"ENTRY_PAGE_SIZE": 16}, {"req_to_token_ptr_stride": 350}):
        assert declined(LIST, **{**call, **change}), change


def test_a_drawn_list_is_of_tokens_that_the_table_has() -> None:
    call = slot_list(kv_start_idx=torch.tensor([1, 2, 3]), token_mapping=other_slots())
    definition = checked(kernel_of(LIST, **call))
    axes = {"max_num_reqs": 4, "max_context": 50, "batch_size": 3, "len_indptr": 4, "num_kv_indices": 120}
    axes["num_slots"] = 90
    workload = Workload(uuid="one", axes=axes, inputs={name: RandomInput() for name in definition.inputs})
    made = dict(zip(definition.inputs, make_inputs(definition, workload, None).inputs, strict=True))
    assert (made["lengths"] <= made["kv_indptr"].diff()).all() and made["first"].min() >= 0
    assert (made["first"] + made["lengths"]).max() <= 50 and made["req_pool_indices"].max() < 4
    scope: Arguments = {}
    exec(definition.reference, scope)
    assert scope["run"](**made).shape == (120,)


def splits(lengths: list[int], **more: Any) -> Arguments:
    return {
        "num_kv_splits_ptr": torch.full((9,), 77, dtype=torch.int32),
        "seq_lens_ptr": torch.tensor([*lengths, 10**6]),
        "num_seq": len(lengths),
        "num_group": 1,
        "num_head": 32,
        "num_kv_head": 8,
        "max_kv_splits": 8,
        "device_core_count": 132,
        **more,
    }


@pytest.mark.parametrize("heads", [(32, 8), (16, 16), (64, 2)])
@pytest.mark.parametrize("lengths", [[1], [4096], [900, 1000], [30, 5000, 200], [64] * 7, list(range(1, 400, 9))])
def test_parts_are_as_many_as_sglangs(
    launchers: dict[str, Launcher], lengths: list[int], heads: tuple[int, int]
) -> None:
    buffer = torch.full((64,), 77, dtype=torch.int32)
    call = splits(lengths, num_head=heads[0], num_kv_head=heads[1], num_kv_splits_ptr=buffer)
    launcher = launchers["get_num_kv_splits_triton"]
    kernel = agrees(SPLITS, lambda **call: launcher[(1,)](**call, MAX_NUM_SEQ=64), **call)
    assert kernel.name == f"kv_splits_h{heads[0]}_kv{heads[1]}_s8_sm132"
    assert buffer[len(lengths) :].unique().tolist() == [77]
    flag = {"uneven_batch_ptr": torch.full((1,), 7, dtype=torch.int32)}  # 0.5.23's
    told = agrees(SPLITS, lambda **call: launcher[(1,)](**call, MAX_NUM_SEQ=64), **call, **flag)
    assert told.name == f"kv_splits_uneven_h{heads[0]}_kv{heads[1]}_s8_sm132"


def test_what_is_declined_of_the_parts() -> None:
    call = splits([5, 7])
    one = launched(SPLITS.removesuffix(".s01234567"), splits([5]), "num_seq", "num_group")
    assert one.name == kernel_of(SPLITS, **call).name and one.sizes()["batch_size"] == 1
    for change in ({"num_group": 2}, {"num_seq": 5}):
        assert declined(SPLITS, **{**call, **change}), change


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_softcap_is_a_scaled_tanh(dtype: torch.dtype) -> None:
    """SGLang's kernel calls CUDA's tanh, which no interpreter has: its formula is written out here."""
    x = randn(3, 70, dtype=dtype) * 40

    def run(full_logits_ptr: torch.Tensor, softcapping_value: float, **_: Any) -> None:
        full_logits_ptr.copy_(softcapping_value * torch.tanh(full_logits_ptr.double() / softcapping_value))

    kernel = agrees(SOFTCAP, run, full_logits_ptr=x.clone(), softcapping_value=30.0, ncols=210, row_stride=210)
    assert kernel.name == f"softcap30{'_bf16' if dtype == torch.bfloat16 else ''}_v70"
    assert checked(kernel).written_inputs == {"logits": "output"}
    wide = kernel_of(SOFTCAP, full_logits_ptr=x, softcapping_value=30.0, output_ptr=x.float(), CAST_TO_FP32=True)
    assert wide.outputs["output"].dtype == "float32" and not checked(wide).written_inputs
    assert declined(SOFTCAP, full_logits_ptr=x, softcapping_value=None, output_ptr=x.float(), APPLY_SOFTCAP=False)


def test_states_are_looked_up_of_the_recorded_requests() -> None:
    """The table of all requests is none of a Sample: any will do that has room for them."""
    kernel = kernels("sglang", "kernels/ops/mamba/mamba_state_indices_triton.py")["_fused_replay_state_indices_kernel"]
    shapes = {"req_pool_indices_ptr": (4, "int64"), "mamba_map_ptr": (9, "int32"), "out_ptr": (4, "int32")}
    args = [
        Argument(name=name, value=TensorSpec((size,), dtype, storage=number))
        for number, (name, (size, dtype)) in enumerate(shapes.items())
    ]
    args += [Argument(name=name, value=value) for name, value in (("v2p_ptr", None), ("valid_bs", 3), ("total_bs", 4))]
    bound = BoundCall("triton::_fused_replay_state_indices_kernel", args)
    bound.set_content("req_pool_indices_ptr", torch.tensor([8, 2, 5, 7]))
    apply_rule(bound, replay_rule_for(bound.operator))
    resolve_integers(bound)
    inputs = build_inputs(bound, Target("cpu", "cpu"))
    inputs.args[1].copy_(torch.arange(9) * 10)
    kernel[1,](*inputs.args, BS_UPPER=4, HAS_V2P=False)
    assert inputs.args[2].tolist() == [80, 20, 50, -1] and inputs.args[0].tolist() == [8, 2, 5, 0]

"""mamba_track: the reference against SGLang's Triton kernel, interpreted; where replay and Workloads copy states to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn
from interpreted import kernels
from test_chunked_delta_rule import made_by_rule
from test_sglang_delta_rule import bound_call

from kcap.schemas.derive.bound_call import Skip, invocation_of_bound, replay_rule_for
from kcap.schemas.derive.cost import CostInputs, cost_of_instance
from kcap.schemas.derive.families import cost_function_for, recognize
from kcap.schemas.derive.workload_draft import WorkloadDraft

OPERATOR = "triton::track_mamba_state_if_needed_kernel.s01234567"
POOL, ROW = 9, {"conv": (6, 3), "ssm": (2, 4, 5)}
ROW_BYTES = 2 * 6 * 3 + 4 * 2 * 4 * 5


def tracked(layers: int = 0, **more: Any) -> dict[str, Any]:
    """States of one layer, or of several stacked; the last sequence is padding."""
    stacked = (layers, POOL) if layers else (POOL,)
    call = {
        "conv_states_ptr": randn(*stacked, *ROW["conv"]),
        "ssm_states_ptr": randn(*stacked, *ROW["ssm"], dtype=torch.float32, seed=1),
        "cache_indices_ptr": torch.tensor([3, 8, 1, -1], dtype=torch.int32),
        "mamba_track_mask_ptr": torch.tensor([True, False, True, False]),
        "mamba_track_indices_ptr": torch.tensor([4, 0, 2, -1]),
    }
    return {**call, **more}


def run(**call: Any) -> None:
    kernel = kernels("sglang", "kernels/ops/mamba/mamba_state_scatter_triton.py")[OPERATOR.split("::")[1].split(".")[0]]
    conv, ssm = call["conv_states_ptr"], call["ssm_states_ptr"]
    layers = conv.shape[0] if conv.dim() == 4 else 1
    strides = {
        f"{name}_{of}_stride": tensor.stride(-len(ROW[name]) - place)
        if tensor.dim() > len(ROW[name]) + place - 1
        else 0
        for name, tensor in (("conv", conv), ("ssm", ssm))
        for place, of in ((1, "row"), (2, "layer"))
    }
    sizes = {"batch_size": len(call["cache_indices_ptr"]), "num_layers": layers, "BS_POW2": 16, "BLOCK_SIZE": 16}
    sizes |= {"conv_state_numel_per_row": 18, "ssm_state_numel_per_row": 40, "check_freed_slots": True}
    sizes |= {"CONV_CHUNK": 16, "SSM_CHUNK": 16, "NUM_CONV_CHUNKS": 2, "NUM_SSM_CHUNKS": 3}
    kernel[(3,)](**call, **strides, **sizes)


@pytest.mark.parametrize("layers", [0, 3])
def test_copied_states_are_the_kernels(layers: int) -> None:
    call = tracked(layers)
    before = call["ssm_states_ptr"].clone()
    instance = agrees(OPERATOR, run, **call)
    after = instance.outputs["new_ssm_state"].get()
    assert not torch.equal(after, before) and torch.equal(after[..., 4, :, :, :], before[..., 3, :, :, :])
    assert instance.name == f"mamba_track{'_l3' if layers else ''}_c6_w3_h2_d4_s5"
    assert checked(instance).var_axes == ["pool_size", "batch_size"]


def test_a_freed_state_is_not_copied() -> None:
    targets = torch.tensor([4, -1, 2, 5])
    agrees(OPERATOR, run, **tracked(mamba_track_mask_ptr=torch.ones(4) > 0, mamba_track_indices_ptr=targets))


@pytest.mark.parametrize("layers", [0, 3])
def test_states_that_are_copied_are_read_and_written(layers: int) -> None:
    instance = kernel_of(OPERATOR, **tracked(layers))
    cost = cost_of_instance(instance)
    assert cost.bytes == 2 * 2 * max(layers, 1) * ROW_BYTES + 4 * (4 + 1 + 8)
    function = cost_function_for("mamba_track")
    inputs = {name: arg.get() for name, arg in instance.inputs.items()}
    assert function is not None and function(CostInputs(instance.definition(), inputs)).bytes == cost.bytes


def test_a_graphs_buffer_may_be_longer_than_its_batch() -> None:
    call = tracked(mamba_track_indices_ptr=torch.tensor([4, 0, 2, -1, 7, 7]))
    assert agrees(OPERATOR, run, **call).inputs["track_indices"].get().tolist() == [4, 0, 2, -1]


def test_states_of_another_shape_are_declined() -> None:
    assert declined(OPERATOR, **tracked(ssm_states_ptr=torch.zeros(POOL, 40)))


def test_replay_copies_to_states_behind_the_batchs() -> None:
    call = tracked(conv_states_ptr=torch.empty(90, 6, 3, device="meta"), ssm_states_ptr=torch.empty(90, 2, 4, 5))
    bound = bound_call(OPERATOR, call, cache_indices_ptr=torch.tensor([80, 20, 30, -1]))
    contents = [bound.content(name) for name in ("cache_indices_ptr", "mamba_track_indices_ptr")]
    assert [content.tolist() for content in contents if content is not None] == [[3, 1, 2, -1], [4, 5, 6, 7]]
    assert bound.spec("conv_states_ptr").shape[0] == bound.spec("ssm_states_ptr").shape[0] == 8
    assert bound.contents["3"].tolist() == [True, True, True, False], "all but padding"
    full = bound_call(OPERATOR, tracked(3), cache_indices_ptr=torch.tensor([8, 2, 3, 4, 5, 6]))
    assert full.contents["4"].tolist() == [7, 8, -1, -1, -1, -1], "there is no more room"
    assert full.contents["3"].tolist() == [True, True, False, False, False, False]
    assert full.spec("conv_states_ptr").shape[:2] == (3, POOL)
    with pytest.raises(Skip, match="no Sample holds the states"):
        bound_call(OPERATOR, tracked())


def test_what_is_timed_copies_nothing_as_most_steps_do() -> None:
    bound = bound_call(OPERATOR, tracked(), timed=True, cache_indices_ptr=torch.tensor([8, 2, 3, -1]))
    assert not bound.contents["3"].any()
    rule = replay_rule_for("triton::track_mamba_state_if_needed_kernel")
    assert rule.touched(bound, 1 << 30) == 16 * 4 and set(rule.idempotent_writes) < {arg.name for arg in bound.args}
    kernel = recognize(invocation_of_bound(bound))
    assert kernel is not None and cost_of_instance(kernel).bytes == 4 * (4 + 1 + 8)


def test_a_workload_copies_to_free_states() -> None:
    draft = WorkloadDraft(
        checked(kernel_of(OPERATOR, **tracked())),
        {"pool_size": 9, "batch_size": 4},
        {},
        torch.Generator(),
        made_by_rule,
    )
    assert len({*draft["state_indices"].tolist(), *draft["track_indices"].tolist()}) == 8

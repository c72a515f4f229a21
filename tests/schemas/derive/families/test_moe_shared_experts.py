"""moe_shared_experts: the reference against SGLang's Triton kernel, interpreted; drawn ids, in Workloads and replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, kernel_of, launched, randn
from interpreted import kernels
from test_chunked_delta_rule import made_by_rule
from test_sglang_delta_rule import bound_call

from kcap.schemas.derive.cost import CostInputs, cost_of_instance
from kcap.schemas.derive.families import cost_function_for
from kcap.schemas.derive.workload_draft import WorkloadDraft

OPERATOR = "triton::_fused_append_shared_experts_with_weights_kernel.s01234567"
TOKENS, K, S, EXPERTS, HIDDEN = 5, 3, 2, 8, 24


def appended(ids: torch.dtype = torch.int32, **more: Any) -> dict[str, Any]:
    """As SGLang 0.5.15 calls it, whose kernel takes the first of these alone."""
    chosen = torch.stack([torch.randperm(EXPERTS)[:K] for _ in range(TOKENS)]).to(ids)
    call = {
        "topk_ids_ptr": chosen,
        "topk_weights_ptr": randn(TOKENS, K, dtype=torch.float32).sigmoid(),
        "shared_weights_ptr": randn(TOKENS, S, dtype=torch.float32, seed=1),
        "out_ids_ptr": torch.full((TOKENS, K + S), 7, dtype=ids),
        "out_weights_ptr": torch.full((TOKENS, K + S), 7.0),
        "N_BASE": EXPERTS,
    }
    return {**call, "K": K, "S": S, **more}


def run(**call: Any) -> None:
    kernel = kernels("sglang", "kernels/ops/moe/fused_moe_triton_kernels.py")[OPERATOR.split("::")[1].split(".")[0]]
    unused = {"hidden_ptr": call["topk_weights_ptr"], "wgate_ptr": call["topk_weights_ptr"], "scale": 1.0}
    fixed = {"BLOCK_K": 4, "BLOCK_S": 2, "APPLY_SIGMOID": False, "FUSE_GATE": False, "HIDDEN": HIDDEN, "BLOCK_H": 32}
    kernel[(TOKENS,)](**{**unused, **fixed, **call})


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_given_weights_are_appended(ids: torch.dtype) -> None:
    instance = agrees(OPERATOR, run, **appended(ids))
    assert instance.name == "moe_shared_experts_topk3_s2_e8"
    assert instance.outputs["topk_ids_out"].get()[0, K:].tolist() == [EXPERTS, EXPERTS + 1]
    assert launched(OPERATOR.rpartition(".")[0], appended(ids), "K", "S").definition() == instance.definition()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_become_weights(dtype: torch.dtype) -> None:
    logits = randn(TOKENS, S, dtype=dtype, seed=2)
    instance = agrees(OPERATOR, run, **appended(shared_weights_ptr=logits, APPLY_SIGMOID=True, scale=2.5))
    assert instance.name.startswith("moe_shared_experts_sigmoid")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gates_product_becomes_the_weight(dtype: torch.dtype) -> None:
    gate = {"hidden_ptr": randn(TOKENS, HIDDEN, dtype=dtype, seed=2), "wgate_ptr": randn(HIDDEN, dtype=dtype, seed=3)}
    instance = agrees(OPERATOR, run, **appended(**gate, FUSE_GATE=True, scale=0.5))
    assert instance.name.startswith("moe_shared_experts_gated_h24") and "shared_weights" not in instance.inputs
    function, inputs = cost_function_for(instance.op_type), {name: arg.get() for name, arg in instance.inputs.items()}
    assert function is not None
    assert function(CostInputs(checked(instance), inputs)).flops == cost_of_instance(instance).flops == 2 * TOKENS * 24


def test_experts_of_a_workload_are_distinct_and_none_is_shared() -> None:
    instance = kernel_of(OPERATOR, **appended())
    definition = checked(instance)
    draft = WorkloadDraft(definition, {"seq_len": 40}, {}, torch.Generator(), made_by_rule)
    assert all(len(set(row)) == K and max(row) < EXPERTS for row in draft["topk_ids"].tolist())
    assert draft["shared_weights"].min() > 0
    function = cost_function_for(definition.op_type)
    inputs = {name: arg.get() for name, arg in instance.inputs.items()}
    assert function is not None and function(CostInputs(definition, inputs)) == cost_of_instance(instance)


def test_replayed_experts_are_drawn_unless_a_sample_holds_them() -> None:
    drawn = bound_call(OPERATOR, appended())
    ids = drawn.content("topk_ids_ptr")
    assert ids is not None and all(len(set(row)) == K and 0 <= min(row) <= max(row) < EXPERTS for row in ids.tolist())
    out = drawn.content("out_ids_ptr")
    assert out is not None and out.shape == (TOKENS, K + S)
    sampled = torch.arange(TOKENS * K).reshape(TOKENS, K) % EXPERTS
    kept = bound_call(OPERATOR, appended(), topk_ids_ptr=sampled).content("topk_ids_ptr")
    assert kept is not None and torch.equal(kept, sampled)

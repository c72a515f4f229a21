"""moe_routing and moe_sum: against vLLM's operator and other ways to say the same, names, what is declined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, needs_avx512, randn

SIZES = [(1, 8, 2), (5, 16, 4), (17, 64, 8), (33, 128, 8), (7, 256, 6)]


@needs_avx512
def test_reference_is_vllms_cpu_operator():
    load_vllm_kernels()
    for seed, (tokens, experts, k) in enumerate([(1, 256, 6), (5, 256, 6), (17, 256, 6), (33, 256, 6), (64, 256, 6)]):
        logits, bias = randn(tokens, experts, dtype=torch.float32, seed=seed), randn(experts, dtype=torch.float32)
        kernel = agrees(
            "_C::biased_topk_cpu",
            torch.ops._C.biased_topk_cpu,
            hidden_states=logits,
            gating_output=logits,
            correction_bias=bias,
            topk=k,
            renormalize=True,
            scoring_func="sqrtsoftplus",
            num_fused_shared_experts=0,
            routed_scaling_factor=1.5,
            apply_routed_scaling_factor_on_output=True,
        )
        assert kernel.name == "moe_routing_bias_sqrtsoftplus_renorm_scale1.5_topk6_e256"


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_of_the_best_logits(renormalize: bool):
    """vLLM's fallback: renormalized, it is the softmax over the chosen logits alone."""
    for seed, (tokens, experts, k) in enumerate(SIZES):
        logits = randn(tokens, experts, dtype=torch.float32, seed=seed)
        weights, ids = torch.empty(tokens, k), torch.empty(tokens, k, dtype=torch.int32)

        def run(topk_weights: Any, topk_indices: Any, gating_output: Any, renormalize: bool, **_: Any) -> None:
            best, chosen = torch.topk(gating_output, topk_indices.shape[1], dim=-1)
            whole = torch.logsumexp(best if renormalize else gating_output, dim=-1, keepdim=True)
            topk_weights.copy_((best - whole).exp())
            topk_indices.copy_(chosen)

        shared = {"topk_weights": weights, "topk_indices": ids, "gating_output": logits, "renormalize": renormalize}
        agrees("_moe_C::topk_softmax", run, token_expert_indices=ids, bias=None, **shared)


def test_of_equal_experts_the_first_are_chosen():
    logits = torch.zeros(3, 64, dtype=torch.bfloat16)
    weights, ids = torch.empty(3, 4), torch.arange(4, dtype=torch.int32).repeat(3, 1)
    shared = {"topk_weights": weights, "topk_indices": ids, "gating_output": logits, "renormalize": True}
    agrees("_moe_C::topk_softmax", lambda topk_weights, **_: topk_weights.fill_(0.25), **shared)


def test_deepseeks_roots_of_softplus():
    for seed, (tokens, experts, k) in enumerate(SIZES):
        logits, bias = randn(tokens, experts, dtype=torch.float32, seed=seed), randn(experts, dtype=torch.float32)

        def run(topk_weights: Any, topk_indices: Any, gating_output: Any, bias: Any, **_: Any) -> None:
            scores = (1 + gating_output.double().exp()).log().sqrt()
            topk_indices.copy_(torch.topk(scores + bias, topk_indices.shape[1]).indices)
            weights = scores.gather(1, topk_indices.long())
            topk_weights.copy_(1.5 * weights / weights.sum(1, keepdim=True))

        results = {"topk_weights": torch.empty(tokens, k), "topk_indices": torch.empty(tokens, k, dtype=torch.int32)}
        rest = {"gating_output": logits, "bias": bias, "renormalize": True, "routed_scaling_factor": 1.5}
        agrees("_moe_C::topk_softplus_sqrt", run, **results, **rest, input_ids=None, tid2eid=None)
        assert declined("_moe_C::topk_softplus_sqrt", **results, **rest, tid2eid=torch.zeros(7, k))


def chosen(biased: torch.Tensor, groups: int, kept: int, top_k: int) -> list[int]:
    """The best experts of one token's best groups, by sorting."""
    of = [range(g * len(biased) // groups, (g + 1) * len(biased) // groups) for g in range(groups)]
    best = sorted(of, key=lambda group: -sum(sorted((float(biased[e]) for e in group), reverse=True)[:2]))[:kept]
    return sorted((e for group in best for e in group), key=lambda e: -float(biased[e]))[:top_k]


def test_groups_as_in_deepseek():
    for seed, (tokens, experts, groups, kept) in enumerate(
        [(1, 256, 8, 4), (5, 64, 4, 2), (9, 32, 8, 3), (33, 16, 2, 1)]
    ):
        logits, bias = randn(tokens, experts, dtype=torch.float32, seed=seed), randn(experts, dtype=torch.float32)

        def run(scores: Any, topk_group: int, bias: Any, groups: int = groups, **_: Any) -> Any:
            sigmoid = scores.sigmoid()
            ids = torch.tensor([chosen(row, groups, topk_group, 4) for row in sigmoid + bias])
            weights = sigmoid.gather(1, ids)
            return 2.5 * weights / weights.sum(1, keepdim=True), ids.int()

        rest = {"topk": 4, "renormalize": True, "routed_scaling_factor": 2.5, "bias": bias, "scoring_func": 1}
        name = f"moe_routing_bias_sigmoid_renorm_scale2.5_topk4_ng{groups}_kg{kept}_e{experts}"
        for group_name in ("n_group", "num_expert_group"):  # of vLLM 0.22's schema, and of an older one's
            call_arguments = {"scores": logits, group_name: groups, "topk_group": kept, **rest}
            assert agrees("_moe_C::grouped_topk", run, **call_arguments).name == name


@pytest.mark.parametrize("operator", ["flashinfer::fused_topk_deepseek", "sglang::fused_topk_deepseek"])
def test_flashinfers_routing_writes_what_it_chose(operator: str):
    logits, bias = randn(5, 64, dtype=torch.float32), randn(64, dtype=torch.float32, seed=1)
    weights, ids = torch.empty(5, 4), torch.empty(5, 4, dtype=torch.int32)
    if operator.startswith("flashinfer"):
        given = {"scores": logits, "bias": bias, "n_group": 4, "routed_scaling_factor": 2.5}
        results = {"topk_values": weights, "topk_indices": ids}
    else:
        given = {"gating_output": logits, "correction_bias": bias, "num_expert_group": 4, "scaling_factor": 2.5}
        results = {"topk_weights": weights, "topk_ids": ids}

    def run(**_: Any) -> None:
        sigmoid = logits.sigmoid()
        ids.copy_(torch.tensor([chosen(row, 4, 2, 4) for row in sigmoid + bias]))
        best = sigmoid.gather(1, ids.long())
        weights.copy_(2.5 * best / best.sum(1, keepdim=True))

    kernel = agrees(operator, run, **given, **results, topk_group=2, topk=4, launch_with_pdl=True)
    assert kernel.name == "moe_routing_bias_sigmoid_renorm_scale2.5_topk4_ng4_kg2_e64"


def test_names_of_qwen3():
    weights, ids = torch.empty(256, 8, device="meta"), torch.empty(256, 8, dtype=torch.int32, device="meta")
    logits = torch.empty(256, 128, dtype=torch.bfloat16, device="meta")
    shared = {"topk_weights": weights, "topk_indices": ids, "gating_output": logits, "renormalize": True}
    definition = checked(kernel_of("_moe_C::topk_softmax", token_expert_indices=ids, bias=None, **shared))
    assert definition.name == "moe_routing_bf16_softmax_renorm_topk8_e128"
    assert definition.var_axes == ["seq_len"]
    assert {name: t.dtype for name, t in definition.outputs.items()} == {"topk_weights": "float32", "topk_ids": "int32"}
    assert kernel_of("sgl_kernel::topk_softmax", moe_softcapping=0.0, **shared).name == definition.name
    assert declined("sgl_kernel::topk_softmax", moe_softcapping=30.0, **shared)


def test_fused_shared_experts_and_groups_without_a_bias_are_declined():
    logits, bias = torch.empty(4, 64, device="meta"), torch.empty(64, device="meta")
    gate = {"input": logits, "bias": bias, "topk": 4, "num_expert_group": 4, "topk_group": 2}
    assert kernel_of("sgl_kernel::moe_fused_gate", **gate, num_fused_shared_experts=0).op_type == "moe_routing"
    assert declined("sgl_kernel::moe_fused_gate", **gate, num_fused_shared_experts=1)
    assert declined("_moe_C::grouped_topk", scores=logits, bias=bias, topk=4, scoring_func=7, num_expert_group=1)


def test_moe_sum_adds_up_a_tokens_experts():
    for seed, (tokens, hidden, k) in enumerate(SIZES):
        x, output = randn(tokens, k, hidden, seed=seed), torch.empty(tokens, hidden, dtype=torch.bfloat16)
        kernel = agrees(
            "_moe_C::moe_sum", lambda input, output: torch.sum(input, 1, out=output), input=x, output=output
        )
        assert kernel.name == f"moe_sum_topk{k}_h{hidden}"
        agrees(
            "sgl_kernel::moe_sum_reduce",
            lambda input, output, routed_scaling_factor: output.copy_(input.double().sum(1) * routed_scaling_factor),
            input=x,
            output=output,
            routed_scaling_factor=2.5,
        )

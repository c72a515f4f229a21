"""moe_routing and moe_sum: against vLLM's operator, SGLang's Triton kernels, interpreted, and other ways to say it.

Also names, what is declined, replay.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, launched, load_vllm_kernels, needs_avx512, randn
from interpreted import Launcher, kernels

from kcap.schemas.derive.bound_call import BoundCall, replay_rule_for
from kcap.schemas.recording.records import Argument
from kcap.schemas.recording.values import TensorSpec

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


LIBDEVICE = """class libdevice:
    def exp(x):
        return tl.exp(x)

    def log1p(x):
        return tl.log(1.0 + x)

    def sqrt(x):
        return tl.sqrt(x)
"""


@pytest.fixture(scope="module")
def router_kernel() -> Launcher:
    """`libdevice` is CUDA's: the interpreter has its functions by other names."""
    return kernels("sglang", "kernels/ops/moe/moe_fused_gate.py", head=LIBDEVICE)["_router_triton_kernel"]


def triton_router(logits: torch.Tensor, bias: torch.Tensor | None = None, **more: Any) -> dict[str, Any]:
    """The arguments of `_router_triton_kernel`, as SGLang 0.5.23 passes them. `more`: those that differ."""
    tokens, experts = logits.shape
    routed, groups = more.pop("K_ROUTED", 4), more.pop("N_GROUP", 1)
    k = routed + more.pop("shared", 0)
    named = {
        "scores_ptr": logits,
        "bias_ptr": logits if bias is None else bias,
        **dict.fromkeys(("bias_alt_ptr", "input_ids_ptr", "num_token_non_padded_ptr")),
        "out_weights_ptr": torch.full((tokens, k), 7.0),
        "out_indices_ptr": torch.full((tokens, k), 7, dtype=torch.int32),
        "out_packed_ptr": torch.empty(1, dtype=torch.int32),
        "M": tokens,
        "routed_scaling_factor": 1.0,
        "moe_softcapping": 0.0,
        "N": experts,
        "K": k,
        "K_ROUTED": routed,
        "BLOCK_M": 2,
        "BLOCK_N": 64,
        "BLOCK_K": 8,
        "N_GROUP": groups,
        "TOPK_GROUP": 1,
        "EXPERTS_PER_GROUP": experts // groups,
        "BLOCK_G": groups,
        "SCORING_FUNC": 0,
        "RENORMALIZE": True,
        "HAS_BIAS": bias is not None,
        **dict.fromkeys(("SQRTSOFTPLUS_LOG1P", "HAS_SOFTCAP", "APPLY_SCALE", "HAS_TOKEN_BIAS", "HAS_PADDING"), False),
        "BIAS_ALT_TOKEN_ID": None,
        "HAS_PACKED": False,
        "RENORMALIZE_EPSILON": 0.0,
        "USE_PDL": False,
        "stride_bias": 1,
        "stride_bias_alt": 0,
        "stride_input_ids": 0,
        "stride_pm": 0,
        "stride_pk": 0,
        "stride_sm": logits.stride(0),
        "stride_sn": logits.stride(1),
        "stride_wm": k,
        "stride_wk": 1,
        "stride_im": k,
        "stride_ik": 1,
    }
    return {**named, **more}


SCALED = {"APPLY_SCALE": True, "routed_scaling_factor": 2.5}
GROUPED = {"N_GROUP": 4, "TOPK_GROUP": 2}
CAPPED = {"SCORING_FUNC": 2, "HAS_SOFTCAP": True, "moe_softcapping": 3.0}
PADDED = {"HAS_PADDING": True, "num_token_non_padded_ptr": torch.tensor([3], dtype=torch.int32)}


@pytest.mark.parametrize(
    ("biased", "more", "word"),
    [
        (True, {}, "bias_bf16_sigmoid_renorm_topk4"),
        (True, {"RENORMALIZE": False, **SCALED}, "bias_bf16_sigmoid_scale2.5_topk4"),
        (True, {"RENORMALIZE_EPSILON": 0.25, **SCALED}, "bias_bf16_sigmoid_renorm_eps0.25_scale2.5_topk4"),
        (True, {"SCORING_FUNC": 1}, "bias_bf16_sqrtsoftplus_renorm_topk4"),
        (True, {"SCORING_FUNC": 1, "SQRTSOFTPLUS_LOG1P": True}, "bias_bf16_sqrtsoftplus_renorm_topk4"),
        (False, {"SCORING_FUNC": 2}, "bf16_softmax_renorm_topk4"),
        (False, {**CAPPED, "RENORMALIZE": False}, "bf16_softmax_cap3_topk4"),
        (True, CAPPED, "bias_bf16_softmax_of_biased_cap3_renorm_topk4"),
        (True, {**GROUPED, **SCALED}, "bias_bf16_sigmoid_renorm_scale2.5_topk4_ng4_kg2_distinct"),
        (True, {**GROUPED, "SCORING_FUNC": 1}, "bias_bf16_sqrtsoftplus_renorm_topk4_ng4_kg2_distinct"),
        (True, {"shared": 1, **SCALED}, "bias_bf16_sigmoid_renorm_scale2.5_topk4_shared1_w1"),
        (
            True,
            {"shared": 2, **PADDED, "routed_scaling_factor": 2.5},
            "bias_padded_bf16_sigmoid_renorm_topk4_shared2_w0.4",
        ),
        (False, {**PADDED, "SCORING_FUNC": 2}, "padded_bf16_softmax_renorm_topk4"),
    ],
)
def test_routing_of_sglangs_triton_kernel(router_kernel: Launcher, biased: bool, more: dict[str, Any], word: str):
    for seed, (tokens, experts) in enumerate([(5, 48), (4, 64), (1, 16)]):
        bias = randn(experts, dtype=torch.float32, seed=seed + 9) if biased else None
        call_arguments = triton_router(4 * randn(tokens, experts, seed=seed), bias, **more)
        grid = (-(-tokens // call_arguments["BLOCK_M"]),)
        kernel = agrees(
            "triton::_router_triton_kernel.s0123", lambda _g=grid, **a: router_kernel[_g](**a), **call_arguments
        )
        assert kernel.name == f"moe_routing_{word}_e{experts}"


def test_equal_scores_of_sglangs_triton_kernel(router_kernel: Launcher):
    """The first experts are chosen, the first groups too; of equal scores in a group one counts."""
    logits = torch.tensor([[2.0, 2, 0, 0], [1, 1, 0, 0], [2, 1, 0, 0], [1.5, 1, 0, 0]]).flatten().repeat(3, 1)
    logits[1] = logits[1].roll(4)
    for more in ({}, {**GROUPED, "TOPK_GROUP": 1}, {**GROUPED, "TOPK_GROUP": 3}):
        call_arguments = triton_router(logits, torch.zeros(16), K_ROUTED=3, **more)
        agrees("triton::_router_triton_kernel", lambda **a: router_kernel[2,](**a), **call_arguments)


def test_the_older_kernel_of_sglang_always_has_a_bias():
    call_arguments = triton_router(randn(5, 64), randn(64))
    del call_arguments["HAS_BIAS"]
    assert kernel_of("triton::_router_triton_kernel", **call_arguments).name == (
        "moe_routing_bias_bf16_sigmoid_renorm_topk4_e64"
    )


def test_what_of_sglangs_triton_kernel_is_declined():
    logits, bias = randn(5, 64), randn(64)
    base = triton_router(logits, bias)
    assert kernel_of("triton::_router_triton_kernel", **base).op_type == "moe_routing"
    for more in ({"HAS_TOKEN_BIAS": True}, {"HAS_PACKED": True}, {**GROUPED, "SCORING_FUNC": 2}, {"SCORING_FUNC": 3}):
        assert declined("triton::_router_triton_kernel", **triton_router(logits, bias, **more))


def test_launches_of_sglangs_triton_kernels_are_known_as_they_are_recorded():
    call_arguments = triton_router(
        randn(5, 48), randn(48, dtype=torch.float32), shared=1, **GROUPED, **SCALED, **PADDED
    )
    constants = [name for name in call_arguments if name.isupper() and name != "M"]
    kernel = launched("triton::_router_triton_kernel", call_arguments, *constants)
    assert kernel.key == kernel_of("triton::_router_triton_kernel", **call_arguments).key
    sums = {"input_ptr": randn(5, 3, 48), "output_ptr": randn(5, 48), "routed_scaling_factor": 2.5}
    assert (
        launched("triton::_moe_sum_reduce_kernel", sums, "routed_scaling_factor").name == "moe_sum_scale2.5_topk3_h48"
    )


def test_replay_of_sglangs_triton_kernel_pads_no_row_of_which_it_is_not_known():
    names = {"scores_ptr": (5, 64), "num_token_non_padded_ptr": (1,), "out_indices_ptr": (5, 4), "input_ids_ptr": (5,)}
    dtypes = {"scores_ptr": "bfloat16"}
    specs = {
        name: TensorSpec(shape, dtypes.get(name, "int32"), storage=i) for i, (name, shape) in enumerate(names.items())
    }
    bound = BoundCall(
        "triton::_router_triton_kernel", [Argument(name=name, value=spec) for name, spec in specs.items()]
    )
    replay_rule_for(bound.operator).prepare(bound)
    assert {path: values.flatten().tolist() for path, values in bound.contents.items()} == {
        "1": [5],
        "2": [0] * 20,
        "3": [0] * 5,
    }


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


def test_sums_of_sglangs_triton_kernel():
    launcher = kernels("sglang", "kernels/ops/moe/fused_moe_triton_kernels.py")["_moe_sum_reduce_kernel"]
    for dtype, scale in ((torch.bfloat16, 2.5), (torch.float32, 1.0)):
        x, output = randn(5, 3, 48, dtype=dtype), torch.full((5, 48), 7.0, dtype=dtype)
        call_arguments = {
            "input_ptr": x,
            "input_stride_0": 144,
            "input_stride_1": 48,
            "input_stride_2": 1,
            "output_ptr": output,
            "output_stride_0": 48,
            "output_stride_1": 1,
            "token_num": 5,
            "topk_num": 3,
            "hidden_dim": 48,
            "routed_scaling_factor": scale,
            "BLOCK_M": 2,
            "BLOCK_DIM": 32,
            "NUM_STAGE": 1,
            "USE_GDC": False,
        }
        kernel = agrees("triton::_moe_sum_reduce_kernel.s0123", lambda **a: launcher[3, 2](**a), **call_arguments)
        assert kernel.name == ("moe_sum_scale2.5_topk3_h48" if scale == 2.5 else "moe_sum_fp32_topk3_h48")
        assert kernel.flops == 5 * 3 * 48

"""fused_moe: references against vLLM's CPU operators, the layouts of their weights, names, bytes, what is declined."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, needs_avx512, randn

SIZES = [(1, 4, 32, 64, 2), (5, 8, 64, 32, 3), (17, 16, 96, 128, 8), (64, 4, 128, 256, 1), (3, 32, 32, 32, 4)]


def routed(tokens: int, experts: int, top_k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and different experts for each token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(dim=-1)[:, :top_k]
    return torch.rand(tokens, top_k, generator=generator), ids.to(torch.int32)


def matrices(experts: int, intermediate: int, hidden: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    w1, w2 = randn(experts, 2 * intermediate, hidden, seed=seed), randn(experts, hidden, intermediate, seed=seed + 1)
    return w1 / hidden**0.5, w2 / intermediate**0.5


def packed(weight: torch.Tensor, isa: str) -> torch.Tensor:
    out = torch.empty_like(weight)
    torch.ops._C.prepack_moe_weight(weight, out, isa)
    return out


def test_reference_is_vllms_cpu_operator():
    load_vllm_kernels()
    for seed, (tokens, e, intermediate, hidden, k) in enumerate(SIZES):
        w1, w2 = matrices(e, intermediate, hidden, seed)
        x, (weights, ids) = randn(tokens, hidden, seed=seed), routed(tokens, e, k, seed)
        kernel = agrees(
            "_C::cpu_fused_moe",
            torch.ops._C.cpu_fused_moe,
            output=torch.empty_like(x),
            input=x,
            w13=packed(w1, "vec"),
            w2=packed(w2, "vec"),
            w13_bias=None,
            w2_bias=None,
            topk_weights=weights,
            topk_id=ids,
            skip_weighted=False,
            act="silu",
            isa="vec",
        )
        assert torch.equal(kernel.inputs["gemm1_weights"].get(), w1)
        assert torch.equal(kernel.inputs["gemm2_weights"].get(), w2)


def test_experts_of_tokens_that_were_weighted_before_them():
    load_vllm_kernels()
    w1, w2 = matrices(4, 64, 96)
    x, (weights, ids) = randn(5, 96), routed(5, 4, 1)
    packs = {"w13": packed(w1, "vec"), "w2": packed(w2, "vec"), "w13_bias": None, "w2_bias": None}
    routing = {"topk_weights": weights, "topk_id": ids, "skip_weighted": True}
    call = {"output": torch.empty_like(x), "input": x, **packs, **routing, "act": "silu", "isa": "vec"}
    kernel = agrees("_C::cpu_fused_moe", torch.ops._C.cpu_fused_moe, **call)
    assert kernel.name == "fused_moe_unweighted_topk1_e4_h96_i64" and "topk_weights" not in kernel.inputs
    assert kernel.touched is not None
    assert kernel.touched() == len(ids.unique()) * 3 * 64 * 96 * 2 + 2 * 5 * 96 * 2 + 5 * ids.element_size()


@pytest.mark.parametrize("isa", ["vec", pytest.param("amx", marks=needs_avx512)])
def test_weights_are_matrices_whatever_their_layout(isa: str):
    load_vllm_kernels()
    w1, w2 = matrices(3, 64, 96)
    x, (weights, ids) = randn(2, 96), routed(2, 3, 2)
    packs = {"w13": packed(w1, isa), "w2": packed(w2, isa)}
    kernel = kernel_of("_C::cpu_fused_moe", input=x, topk_weights=weights, topk_id=ids, act="silu", isa=isa, **packs)
    assert torch.equal(kernel.inputs["gemm1_weights"].get(), w1) and torch.equal(
        kernel.inputs["gemm2_weights"].get(), w2
    )


def by_tokens(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Any:
    """Token by token, in float64; the gate's rows are the first matrix's second half."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            up, gate = (w1[expert].double() @ row).chunk(2)
            out[token] += weight * (w2[expert].double() @ (gate * torch.sigmoid(gate) * up))
    return out.to(x.dtype)


def test_flashinfers_gate_is_the_second_half():
    for seed, (tokens, e, intermediate, hidden, k) in enumerate(SIZES):
        (w1, w2), (weights, ids) = matrices(e, intermediate, hidden, seed), routed(tokens, e, k, seed)
        kernel = agrees(
            "flashinfer::cutlass_fused_moe",
            lambda input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, **_: [
                by_tokens(input, fc1_expert_weights, fc2_expert_weights, token_final_scales, token_selected_experts)
            ],
            input=randn(tokens, hidden, seed=seed),
            token_selected_experts=ids,
            token_final_scales=weights,
            fc1_expert_weights=w1,
            fc2_expert_weights=w2,
            output_dtype=torch.bfloat16,
            quant_scales=[],
            activation_type=3,
        )
        assert kernel.name == f"fused_moe_upgate_topk{k}_e{e}_h{hidden}_i{intermediate}"


def test_cutlass_experts_as_vllm_calls_them():
    """0.22.1 without quantization: all arguments by name, SwiGLU as an `IntEnum`."""
    (w1, w2), (weights, ids), x = matrices(4, 32, 64), routed(5, 4, 2), randn(5, 64)
    names = ("fc1_expert_biases", "fc2_expert_biases", "swiglu_alpha", "swiglu_beta", "swiglu_limit", "input_sf")
    ranks = {"tp_size": 1, "tp_rank": 0, "ep_size": 1, "ep_rank": 0}
    flags = {"use_deepseek_fp8_block_scale": False, "use_mxfp8_act_scaling": False, "use_w4_group_scaling": False}
    matrices_of_call = {"fc1_expert_weights": w1, "fc2_expert_weights": w2}
    routing = {"token_selected_experts": ids, "token_final_scales": weights}
    rest = {**dict.fromkeys(names), **ranks, **flags, "quant_scales": [], "tune_max_num_tokens": 512}
    rest["activation_type"] = IntEnum("ActivationType", {"Swiglu": 3}).Swiglu  # type: ignore[attr-defined]

    def run(output: torch.Tensor, **_: Any) -> list[torch.Tensor]:
        output.copy_(by_tokens(x, w1, w2, weights, ids))
        return [output]

    call_arguments = {"input": x, **routing, **matrices_of_call, **rest, "output_dtype": torch.bfloat16}
    kernel = agrees("flashinfer::cutlass_fused_moe", run, **call_arguments, output=torch.empty_like(x))
    assert kernel.name == "fused_moe_upgate_topk2_e4_h64_i32"
    assert declined("flashinfer::cutlass_fused_moe", **{**call_arguments, "ep_size": 2})
    assert declined("flashinfer::cutlass_fused_moe", **{**call_arguments, "activation_type": 5})


def qwen3(**other: Any) -> dict[str, Any]:
    """The arguments of Qwen3-30B-A3B's experts."""
    shapes = {"output": (32, 2048), "input": (32, 2048), "w13": (128, 1536, 2048), "w2": (128, 2048, 768)}
    call_arguments = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    weights = torch.empty(32, 8, device="meta")
    return {**call_arguments, "topk_weights": weights, "topk_id": weights.int(), "act": "silu", "isa": "vec", **other}


def test_names_of_qwen3():
    kernel = kernel_of("_C::cpu_fused_moe", **qwen3())
    definition = checked(kernel)
    assert definition.name == "fused_moe_topk8_e128_h2048_i768"
    assert definition.var_axes == ["seq_len"]
    assert list(definition.inputs) == ["hidden_states", "gemm1_weights", "gemm2_weights", "topk_weights", "topk_ids"]
    assert kernel.flops() == 2 * 32 * 8 * 3 * 2048 * 768


def test_only_experts_with_tokens_are_touched():
    ids = torch.tensor([[0, 5], [5, 0], [5, 9]])
    call_arguments = {
        "input": randn(3, 64),
        "topk_weights": torch.rand(3, 2),
        "topk_id": ids,
        "act": "silu",
        "isa": "vec",
    }
    w1, w2 = matrices(16, 32, 64)
    kernel = kernel_of("_C::cpu_fused_moe", w13=w1, w2=w2, **call_arguments)
    assert kernel.touched is not None
    assert kernel.touched() == 3 * (3 * 32 * 64 * 2) + 2 * 3 * 64 * 2 + 6 * 12


def test_what_is_not_modelled_is_declined():
    assert declined("_C::cpu_fused_moe", **qwen3(act="swigluoai"))
    assert declined("_C::cpu_fused_moe", **qwen3(isa="neon"))
    assert declined("_C::cpu_fused_moe", **qwen3(w13_bias=torch.empty(128, 1536)))
    names = {"hidden_states": "input", "w1": "w13", "w2": "w2", "topk_weights": "topk_weights", "topk_ids": "topk_id"}
    packs = {name: qwen3()[other] for name, other in names.items()}
    assert kernel_of("_C::fused_experts_cpu", **packs, is_vnni=False).name == "fused_moe_topk8_e128_h2048_i768"
    assert declined("_C::fused_experts_cpu", **packs, is_vnni=True)

"""moe_gemm by Marlin's kernel: experts packed as vLLM's own utilities do, tokens by expert; what is declined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, randn

from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function_for

UINT4B8, FLOAT4 = 0x4000000100400, 0x2000000010102


def sorted_tokens(ids: torch.Tensor, experts: int, block: int) -> dict[str, torch.Tensor]:
    """Pairs of a token and an expert by expert, each expert's padded to whole blocks."""
    tokens: list[int] = []
    owners: list[int] = []
    for expert in range(experts):
        own = torch.nonzero(ids.flatten() == expert).flatten().tolist()
        blocks = -(-len(own) // block)
        tokens += own + [ids.numel()] * (blocks * block - len(own))
        owners += [expert] * blocks
    count = torch.tensor([len(tokens)], dtype=torch.int32)
    names = {"sorted_token_ids": tokens, "expert_ids": owners}
    return {
        **{name: torch.tensor(values, dtype=torch.int32) for name, values in names.items()},
        "num_tokens_past_padded": count,
    }


@pytest.mark.parametrize("weighted", [False, True])
def test_experts_packed_as_vllm_does(weighted: bool) -> None:
    utilities = pytest.importorskip("vllm.model_executor.layers.quantization.utils.marlin_utils_test")
    kind = pytest.importorskip("vllm.scalar_type").scalar_types.uint4b8
    tokens, e, top_k, n, k = 5, 4, 2, 128, 256
    experts = [utilities.marlin_quantize(randn(k, n, dtype=torch.float16, seed=g), kind, 64)[:3] for g in range(e)]
    w, b, scale = (torch.stack(parts) for parts in zip(*experts, strict=True))
    ids = torch.rand(tokens, e, generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :top_k]
    rows, each = (tokens * top_k, 1) if weighted else (tokens, top_k)
    a, weights = randn(rows, k, dtype=torch.float16, seed=3), torch.rand(tokens, top_k)

    def run(a: torch.Tensor, **_: Any) -> torch.Tensor:
        c = torch.empty(tokens * top_k, n, dtype=a.dtype)
        for pair, expert in enumerate(ids.flatten().tolist()):
            factor = weights.flatten()[pair].double() if weighted else 1.0
            c[pair] = (a[pair // each].double() @ w[expert].double()) * factor
        return c

    empty = dict.fromkeys(("c_or_none", "b_bias_or_none", "a_scales", "global_scale", "b_zeros_or_none"))
    order = {
        "g_idx_or_none": torch.empty(e, 0, dtype=torch.int32),
        "perm_or_none": torch.empty(e, 0, dtype=torch.int32),
    }
    call_arguments = {"a": a, "b_q_weight": b, "b_scales": scale, **empty, **order, "topk_weights": weights}
    call_arguments |= {"workspace": torch.zeros(528, dtype=torch.int32), **sorted_tokens(ids, e, 16)}
    sizes = {"moe_block_size": 16, "top_k": each, "mul_topk_weights": weighted, "b_type_id": UINT4B8}
    sizes |= {"size_m": rows, "size_n": n, "size_k": k, "is_full_k": True, "is_zp_float": False}
    kernel = agrees("_moe_C::moe_wna16_marlin_gemm", run, **call_arguments, **sizes)
    word = "_weighted" if weighted else ""
    assert kernel.name == f"moe_gemm{word}_marlin_fp16_n{n}_k{k}_g64_topk{each}_e{e}"
    assert callable(kernel.flops) and kernel.flops() == 2 * tokens * top_k * n * k
    definition = checked(kernel)
    inputs = {name: slot.get() for name, slot in kernel.inputs.items()}
    cost = cost_function_for("moe")
    assert cost is not None and cost(CostInputs(definition, inputs)).flops == kernel.flops()
    assert definition.inputs["topk_ids"].shape == ["num_rows", "top_k"]
    other = {**sizes, "b_type_id": FLOAT4}
    assert declined("_moe_C::moe_wna16_marlin_gemm", **call_arguments, **other)
    biased = {**call_arguments, "b_bias_or_none": torch.zeros(e, n)}
    assert declined("_moe_C::moe_wna16_marlin_gemm", **biased, **sizes)

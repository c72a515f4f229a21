"""References of a layer's other kernels against the CUDA operators themselves: vLLM's, and torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, randn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
FP8 = torch.float8_e4m3fn
ROWS = [1, 2, 7, 64, 257]


def operator(name: str) -> Any:
    """vLLM's operator of this name; the test is skipped where it has none."""
    pytest.importorskip("vllm._custom_ops")
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None:
        pytest.skip(f"this vLLM has no {name}")
    return packet.default


def cuda(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return randn(*shape, seed=seed, dtype=dtype).cuda()


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("rows", ROWS)
def test_norms(rows: int):
    x, residual, weight = cuda(rows, 4096), cuda(rows, 4096, seed=1), cuda(4096)
    plain, fused = operator("_C::rms_norm"), operator("_C::fused_add_rms_norm")
    agrees("_C::rms_norm", plain, result=empty(rows, 4096), input=x, weight=weight, epsilon=1e-5)
    agrees("_C::fused_add_rms_norm", fused, input=x, residual=residual, weight=weight, epsilon=1e-5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_activations(rows: int, name: str):
    run = operator(f"_C::{name}")
    result = run._schema.arguments[0].name
    agrees(f"_C::{name}", run, **{result: empty(rows, 1408), "input": cuda(rows, 2816)})


@pytest.mark.parametrize("rows", ROWS)
def test_gemms_of_float8(rows: int):
    run = operator("_C::cutlass_scaled_mm")
    a, b = cuda(rows, 512).to(FP8), cuda(256, 512, seed=1).to(FP8)
    tokens, channels = cuda(rows, 1, dtype=torch.float32).abs() + 0.1, cuda(256, 1, dtype=torch.float32).abs() + 0.1
    for scale in (channels, channels[:1, 0]):
        shared = {"a_scales": tokens, "b_scales": scale, "bias": None}
        agrees("_C::cutlass_scaled_mm", run, out=empty(rows, 256), a=a, b=b.T, **shared)


@pytest.mark.parametrize("rows", ROWS)
def test_quantization(rows: int):
    x, q, scales = cuda(rows, 4096), empty(rows, 4096, dtype=FP8), empty(rows, 1, dtype=torch.float32)
    run = operator("_C::dynamic_per_token_scaled_fp8_quant")
    agrees("_C::dynamic_per_token_scaled_fp8_quant", run, result=q, input=x, scale=scales, scale_ub=None)
    run = operator("_C::dynamic_scaled_fp8_quant")
    agrees("_C::dynamic_scaled_fp8_quant", run, result=q, input=x, scale=scales[:1, 0])


@pytest.mark.parametrize("rows", ROWS)
def test_mixture_of_experts(rows: int):
    """The router, the sorting of tokens and the sum, as Qwen3-30B-A3B has them."""
    weights, ids = empty(rows, 8, dtype=torch.float32), empty(rows, 8, dtype=torch.int32)
    routed = {"topk_weights": weights, "topk_indices": ids, "token_expert_indices": torch.empty_like(ids)}
    rest = {"gating_output": cuda(rows, 128, dtype=torch.float32), "renormalize": True, "bias": None}
    agrees("_moe_C::topk_softmax", operator("_moe_C::topk_softmax"), **routed, **rest)
    longest = rows * 8 + 128 * 15
    buffers = {
        "sorted_token_ids": empty(longest, dtype=torch.int32),
        "experts_ids": empty(-(-longest // 16), dtype=torch.int32),
        "num_tokens_post_pad": empty(1, dtype=torch.int32),
    }
    run, sizes = operator("_moe_C::moe_align_block_size"), {"num_experts": 128, "block_size": 16}
    agrees("_moe_C::moe_align_block_size", run, topk_ids=ids, **sizes, **buffers, maybe_expert_map=None)
    run = operator("_moe_C::moe_sum")
    agrees("_moe_C::moe_sum", run, input=cuda(rows, 8, 2048), output=empty(rows, 2048))


@pytest.mark.parametrize("rows", ROWS)
def test_gemms_of_torch(rows: int):
    aten = torch.ops.aten
    agrees("aten::linear", aten.linear.default, input=cuda(rows, 2048), weight=cuda(512, 2048, seed=1), bias=None)
    ends = torch.tensor([rows // 2, rows // 2, rows], dtype=torch.int32, device="cuda")
    experts = cuda(3, 256, 512, seed=1).transpose(1, 2)
    agrees("aten::_grouped_mm", aten._grouped_mm.default, self=cuda(rows, 512), mat2=experts, offs=ends)
    agrees("aten::argmax", aten.argmax.default, self=cuda(rows, 32000, dtype=torch.float32), dim=-1, keepdim=False)

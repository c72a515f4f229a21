"""TensorRT-LLM's operators, by the schemas in its sources; what they compute is PyTorch's here, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, declined, kernel_of

from kcap.schemas.derive.families.elementwise.quantize import trtllm_group_scales
from kcap.schemas.derive.invocation import Unrecognized
from kcap.schemas.recording.operators import why_not_called

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(weight.dtype)


@pytest.mark.parametrize("operator", ["cublas_mm", "dsv3_router_gemm_op", "dsv3_fused_a_gemm_op"])
def test_a_product_whose_second_matrix_lies_column_by_column(operator: str) -> None:
    x, weight = torch.randn(3, 32, dtype=BF16), torch.randn(16, 32, dtype=BF16)

    def run(mat_a: torch.Tensor, mat_b: torch.Tensor, bias: None, out_dtype: torch.dtype | None) -> torch.Tensor:
        return (mat_a.float() @ mat_b.float()).to(out_dtype or mat_a.dtype)

    given = {"mat_a": x, "mat_b": weight.T, "bias": None}
    assert agrees(f"trtllm::{operator}", run, **given, out_dtype=None).name == "gemm_bf16_n16_k32"
    kernel = agrees(f"trtllm::{operator}", run, **given, out_dtype=torch.float32)
    assert kernel.name == "gemm_bf16_to_fp32_n16_k32"
    assert declined(f"trtllm::{operator}", **{**given, "bias": torch.zeros(16)}, out_dtype=None)


def test_a_product_of_float8_with_a_scale_for_each_matrix() -> None:
    a, b = torch.randn(3, 32).to(FP8), torch.randn(16, 32).to(FP8)

    def run(mat_a: torch.Tensor, mat_b: torch.Tensor, scale_a: Any, scale_b: Any, **_: Any) -> torch.Tensor:
        return (mat_a.float() @ mat_b.float() * scale_a * scale_b).to(BF16)

    scales = {"scale_a": torch.tensor([0.5]), "scale_b": torch.tensor([0.25])}
    agrees("trtllm::cublas_scaled_mm", run, mat_a=a, mat_b=b.T, **scales, bias=None, out_dtype=BF16)


def group_by_group(scale: torch.Tensor) -> torch.Tensor:
    """Scales [rows, groups] as Hopper's kernels have them: by groups, rows padded to four, with room behind."""
    rows, groups = scale.shape
    padded = -(-rows // 4) * 4
    blob = torch.full((groups * padded + 32,), float("nan"))
    blob[: groups * padded].view(groups, padded)[:, :rows] = scale.T
    return blob


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_scales_of_each_layout(rows: int) -> None:
    scale = torch.rand(rows, 3)
    assert torch.equal(trtllm_group_scales(group_by_group(scale), rows, 384), scale)
    assert torch.equal(trtllm_group_scales(scale.T.contiguous(), rows, 384), scale)
    for other in (scale, scale.T.to(torch.int32)):
        if other.shape != (3, rows) or other.dtype != torch.float32:
            with pytest.raises(Unrecognized):
                trtllm_group_scales(other, rows, 384)


@pytest.mark.parametrize(
    ("operator", "names"),
    [
        ("fp8_block_scaling_gemm_impl", ("mat1", "mat2", "mat1Scale", "mat2Scale")),
        ("fp8_block_scaling_gemm", ("a", "b", "a_scale", "b_scale")),
    ],
)
def test_a_product_with_scales_for_blocks(operator: str, names: tuple[str, ...]) -> None:
    a, b = torch.randn(6, 256).to(FP8), torch.randn(128, 256).to(FP8)
    a_scale, b_scale = torch.rand(6, 2) + 0.5, torch.rand(1, 2) + 0.5

    def run(**_: Any) -> torch.Tensor:
        left = a.float() * a_scale.repeat_interleave(128, 1)
        return (left @ (b.float() * b_scale.repeat_interleave(128, 1)).T).to(BF16)

    given = dict(zip(names, (a, b, group_by_group(a_scale), b_scale), strict=True))
    assert agrees(f"trtllm::{operator}", run, **given).name == "quantized_gemm_n128_k256_ng1_kg2"


def test_rows_quantized_with_a_scale_for_each_group() -> None:
    def run(input: torch.Tensor, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
        groups = input.float().unflatten(-1, (-1, 128))
        scale = groups.abs().amax(-1) / 448.0
        return (groups / scale[..., None]).flatten(-2).to(FP8), group_by_group(scale)

    x = torch.randn(6, 256, dtype=BF16)
    kernel = agrees("trtllm::fp8_quantize_1x128", run, input=x, use_ue8m0=False)
    assert kernel.name == "quantize_per_group_h256_g128"
    assert declined("trtllm::fp8_quantize_1x128", input=x, use_ue8m0=True)


def test_norms_and_activations_around_flashinfer() -> None:
    x, residual, weight = torch.randn(3, 32, dtype=BF16), torch.randn(3, 32, dtype=BF16), torch.randn(32, dtype=BF16)
    agrees(
        "trtllm::flashinfer_rmsnorm",
        lambda input, weight, eps: rms_norm(input, weight, eps),
        input=x,
        weight=weight,
        eps=1e-6,
    )

    def fused(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        total = input.float() + residual.float()
        residual.copy_(total)
        input.copy_(rms_norm(total, weight, eps))

    given = {"input": x.clone(), "residual": residual.clone(), "weight": weight, "eps": 1e-6}
    assert agrees("trtllm::flashinfer_fused_add_rmsnorm", fused, **given).tags == ("fused",)
    silu = lambda x, **_: torch.nn.functional.silu(x[..., :16]) * x[..., 16:]  # noqa: E731
    agrees("trtllm::silu_and_mul", silu, x=x, scale=None, dtype=None)
    agrees("trtllm::flashinfer_silu_and_mul", silu, x=x)
    assert declined("trtllm::silu_and_mul", x=x, scale=torch.ones(1), dtype=FP8)


def test_experts_whose_first_matrix_has_the_gate_last() -> None:
    tokens, experts, hidden, inner = 5, 4, 16, 8
    given = {
        "input": torch.randn(tokens, hidden, dtype=BF16),
        "token_selected_experts": torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)]).int(),
        "token_final_scales": torch.rand(tokens, 2),
        "fc1_expert_weights": torch.randn(experts, 2 * inner, hidden, dtype=BF16),
        "fc1_expert_biases": None,
        "fc2_expert_weights": torch.randn(experts, hidden, inner, dtype=BF16),
        "fc2_expert_biases": None,
        "output_dtype": BF16,
        "quant_scales": [],
    }

    def run(**arguments: Any) -> list[torch.Tensor]:
        w1, w2 = (arguments[f"fc{number}_expert_weights"].float() for number in (1, 2))
        output = torch.zeros(tokens, hidden)
        for token in range(tokens):
            routed = given["token_selected_experts"][token], given["token_final_scales"][token]
            for expert, share in zip(*routed, strict=True):
                up, gate = (w1[expert] @ given["input"][token].float()).chunk(2)
                output[token] += share * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
        return [output.to(BF16)]

    assert agrees("trtllm::fused_moe", run, **given, activation_type=5).name == "fused_moe_upgate_topk2_e4_h16_i8"
    assert declined("trtllm::fused_moe", **given, activation_type=3), "a relu, as TensorRT-LLM counts"
    assert declined("trtllm::fused_moe", **given, ep_size=2)


def test_attention_whose_cache_is_an_address_is_neither_derived_nor_called() -> None:
    q = torch.randn(3, 64)
    assert declined("trtllm::attention_inplace", q=q, k=None, v=None, output=torch.zeros(3, 64))
    assert "addresses" in (why_not_called("trtllm::attention_inplace") or "")
    assert why_not_called("trtllm::cublas_mm") is None
    assert kernel_of("trtllm::flashinfer_gelu_tanh_and_mul", x=q).op_type == "activation"

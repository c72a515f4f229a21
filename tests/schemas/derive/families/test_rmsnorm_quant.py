"""rmsnorm_quant: against torch's norm and a division, names, what is declined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn

FP8 = torch.float8_e4m3fn
SIZES = [(1, 64), (7, 128), (16, 96), (33, 1024), (5, 4096)]


def quantized(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    normed = torch.nn.functional.rms_norm(x.double(), [x.shape[-1]], weight.double(), 1e-5)
    return (normed / scale.double()).clamp(-448, 448).to(FP8)


def plain(result: Any, input: Any, weight: Any, scale: Any, epsilon: float) -> None:
    result.copy_(quantized(input, weight, scale))


def fused(result: Any, input: Any, residual: Any, weight: Any, scale: Any, epsilon: float) -> None:
    total = input.double() + residual.double()
    residual.copy_(total)
    result.copy_(quantized(total, weight, scale))


def test_the_norm_is_divided_by_the_scale():
    for seed, (rows, hidden) in enumerate(SIZES):
        call_arguments = {"result": torch.empty(rows, hidden, dtype=FP8), "input": randn(rows, hidden, seed=seed)}
        rest = {"weight": randn(hidden, seed=seed), "scale": torch.tensor([0.02]), "epsilon": 1e-5}
        kernel = agrees("_C::rms_norm_static_fp8_quant", plain, **call_arguments, **rest)
        assert kernel.name == f"rmsnorm_quant_h{hidden}"
        residual = randn(rows, hidden, seed=seed + 7)
        kernel = agrees("_C::fused_add_rms_norm_static_fp8_quant", fused, **call_arguments, residual=residual, **rest)
        assert kernel.name == f"fused_add_rmsnorm_quant_h{hidden}"


def test_names_and_what_is_declined():
    x, q = torch.empty(8, 4096, dtype=torch.bfloat16, device="meta"), torch.empty(8, 4096, dtype=FP8, device="meta")
    call_arguments = {"out": q, "input": x, "weight": x[0], "scale": torch.ones(1), "eps": 1e-6}
    definition = checked(kernel_of("flashinfer::rmsnorm_quant", **call_arguments))
    assert definition.name == "rmsnorm_quant_eps1e-06_h4096"
    assert definition.inputs["scale"].shape == [] and definition.tags == ["quantization:float8_e4m3fn"]
    assert declined("flashinfer::rmsnorm_quant", **{**call_arguments, "scale": torch.ones(8)})
    assert declined("flashinfer::rmsnorm_quant", **{**call_arguments, "out": q.to(torch.int8)})


@pytest.mark.parametrize("group", [None, 64, 128])
@pytest.mark.parametrize("with_residual", [False, True])
def test_dynamic_scales_of_tokens_and_of_groups(group: int | None, with_residual: bool):
    """As vLLM's compile passes call them: scales of groups lie column by column, rows padded to four."""
    for seed, (rows, hidden) in enumerate([(1, 128), (7, 256), (33, 1024), (5, 4096)]):
        x, weight, size = randn(rows, hidden, seed=seed), randn(hidden, seed=seed + 1), group or hidden
        x[0], count = 0, hidden // size
        scale = torch.empty_strided((rows, count), (1, -(-rows // 4) * 4)) if group else torch.empty(rows, 1)
        residual = randn(rows, hidden, seed=seed + 7) if with_residual else None

        def run(result: Any, input: Any, weight: Any, scale: Any, epsilon: float, residual: Any, **_: Any) -> None:
            total = input.double() + (0 if residual is None else residual.double())
            if residual is not None:
                residual.copy_(total)
            root = (total.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
            normed = (total / root).to(input.dtype) * weight
            groups = normed.double().unflatten(-1, (scale.shape[1], -1))
            scale.copy_((groups.abs().amax(-1) / 448).clamp(min=1 / (448 * 512)))
            result.copy_((groups / scale[..., None].double()).clamp(-448, 448).flatten(1).to(FP8))

        call_arguments = {"result": torch.empty(rows, hidden, dtype=FP8), "input": x, "weight": weight, "scale": scale}
        rest = {"epsilon": 1e-5, "scale_ub": None, "residual": residual}
        layout = {"group_size": group, "is_scale_transposed": True} if group else {}
        name = "rms_norm_per_block_quant" if group else "rms_norm_dynamic_per_token_quant"
        kernel = agrees(f"_C::{name}", run, **call_arguments, **rest, **layout)
        words = f"_g{group}" if group and group < hidden else ""
        assert kernel.name == f"{'fused_add_' if with_residual else ''}rmsnorm_dynamic_quant_h{hidden}{words}"
        bounded = {**rest, "scale_ub": torch.ones(1)}
        assert declined(f"_C::{name}", **call_arguments, **bounded, **layout)

"""quantize: int8 against vLLM's CPU operators, float8 against the definition of a scale, names, what is declined."""

from __future__ import annotations

from typing import Any

import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, needs_avx512, randn

FP8 = torch.float8_e4m3fn
SIZES = [(1, 64), (7, 128), (16, 96), (33, 1024), (5, 4096)]


@needs_avx512
def test_int8_references_are_vllms_cpu_operators():
    load_vllm_kernels()
    for seed, (rows, hidden) in enumerate(SIZES):
        x, out, scale = (
            randn(rows, hidden, seed=seed),
            torch.empty(rows, hidden, dtype=torch.int8),
            torch.empty(rows, 1),
        )
        x[0] = x[0] if rows == 1 else 0  # as padding is
        run = torch.ops._C.dynamic_scaled_int8_quant
        dynamic = agrees("_C::dynamic_scaled_int8_quant", run, out=out, input=x, scale=scale, azp=None)
        assert dynamic.name == f"quantize_per_token_int8_h{hidden}"
        run, call_arguments = torch.ops._C.static_scaled_int8_quant, torch.tensor([0.02])
        static = agrees("_C::static_scaled_int8_quant", run, out=out, input=x, scale=call_arguments, azp=None)
        assert static.name == f"quantize_per_tensor_static_int8_h{hidden}"


def to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.double() / scale.double()).clamp(-448, 448).to(FP8)


def test_a_float8_scale_takes_the_largest_magnitude_to_448():
    for seed, (rows, hidden) in enumerate(SIZES):
        x, q = randn(rows, hidden, seed=seed), torch.empty(rows, hidden, dtype=FP8)

        def run(result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, **_: Any) -> None:
            whole = scale.numel() == 1 and len(scale.shape) == 1
            scale.copy_(input.float().abs().amax() / 448 if whole else input.float().abs().amax(-1, keepdim=True) / 448)
            result.copy_(to_fp8(input, scale))

        agrees("_C::dynamic_scaled_fp8_quant", run, result=q, input=x, scale=torch.empty(1))
        rowwise = {"result": q, "input": x, "scale": torch.empty(rows, 1), "scale_ub": None}
        kernel = agrees("_C::dynamic_per_token_scaled_fp8_quant", run, **rowwise)
        assert kernel.name == f"quantize_per_token_h{hidden}"


def test_rows_of_zeros_stay_zeros():
    """A graph's padding: no magnitude, so no scale."""
    x, q, scale = torch.zeros(3, 64, dtype=torch.bfloat16), torch.empty(3, 64, dtype=FP8), torch.empty(3, 1)
    x[1] = randn(64)

    def run(input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor) -> None:
        output_s.copy_(input.float().abs().amax(-1, keepdim=True) / 448)
        output_q.copy_(to_fp8(input, output_s.clamp(min=1e-30)))

    agrees("sgl_kernel::sgl_per_token_quant_fp8", run, input=x, output_q=q, output_s=scale)


def test_groups_of_columns():
    """Scales lie column by column, as DeepGEMM reads them; an all but empty group counts as `eps`."""
    for seed, (rows, hidden) in enumerate([(1, 128), (7, 256), (16, 384), (33, 1024), (5, 4096)]):
        x, q = randn(rows, hidden, seed=seed), torch.empty(rows, hidden, dtype=FP8)
        x[0, :128] = 0
        scales = torch.empty(hidden // 128, rows).T

        def run(input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor, eps: float, **_: Any) -> None:
            groups = input.float().view(len(input), -1, 128)
            output_s.copy_(groups.abs().amax(-1).clamp(min=eps) / 448)
            output_q.copy_(to_fp8(groups, output_s[..., None]).view_as(input))

        shared = {"group_size": 128, "eps": 1e-10, "fp8_min": -448.0, "fp8_max": 448.0, "scale_ue8m0": False}
        kernel = agrees("_C::per_token_group_fp8_quant", run, input=x, output_q=q, output_s=scales, **shared)
        assert kernel.name == f"quantize_per_group_h{hidden}_g128"


def test_static_scales_are_inputs():
    x, q = torch.empty(8, 4096, dtype=torch.bfloat16, device="meta"), torch.empty(8, 4096, dtype=FP8, device="meta")
    definition = checked(kernel_of("_C::static_scaled_fp8_quant", result=q, input=x, scale=torch.ones(1)))
    assert definition.name == "quantize_per_tensor_static_h4096"
    assert list(definition.inputs) == ["input", "scale"] and list(definition.outputs) == ["output"]
    assert definition.inputs["scale"].shape == [] and definition.tags == ["quantization:float8_e4m3fn"]
    of_sglang = {"input": x, "output_q": q, "output_s": torch.ones(1)}
    assert kernel_of("sgl_kernel::sgl_per_tensor_quant_fp8", is_static=True, **of_sglang).name == definition.name
    assert (
        kernel_of("sgl_kernel::sgl_per_tensor_quant_fp8", is_static=False, **of_sglang).name
        == "quantize_per_tensor_h4096"
    )


def test_what_is_not_modelled_is_declined():
    x, q = torch.empty(8, 256, device="meta"), torch.empty(8, 256, dtype=FP8, device="meta")
    rowwise = {"result": q, "input": x, "scale": torch.ones(8, 1)}
    assert declined("_C::dynamic_per_token_scaled_fp8_quant", **rowwise, scale_ub=torch.ones(1))
    assert declined("_C::static_scaled_fp8_quant", **rowwise)
    grouped = {"input": x, "output_q": q, "output_s": torch.ones(8, 2), "group_size": 128, "eps": 1e-10}
    assert not declined("sgl_kernel::sgl_per_token_group_quant_8bit", **grouped)
    assert declined("sgl_kernel::sgl_per_token_group_quant_8bit", **grouped, scale_ue8m0=True)
    assert declined("sgl_kernel::sgl_per_token_group_quant_8bit", **{**grouped, "output_s": torch.ones(8, 1).int()})
    assert declined("sgl_kernel::sgl_per_token_group_quant_8bit", **{**grouped, "output_s": torch.ones(2, 8)})
    out = torch.empty(8, 256, dtype=torch.int8)
    assert declined("_C::static_scaled_int8_quant", out=out, input=x, scale=torch.ones(1), azp=torch.ones(1))

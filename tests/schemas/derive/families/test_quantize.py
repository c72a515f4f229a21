"""quantize: int8 against vLLM's CPU operators, float8 against the definition of a scale, names, what is declined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, needs_avx512, randn
from interpreted import Launcher, kernels

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


def power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The least one that is not below it."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))


def test_scales_of_groups_are_powers_of_two_for_deep_gemm():
    """vLLM's default on Hopper: rounded up, in float32, column by column with rows padded to four."""
    for seed, (rows, hidden) in enumerate([(1, 128), (7, 256), (33, 1024), (5, 4096)]):
        x, q = randn(rows, hidden, seed=seed) * 2.0**seed, torch.empty(rows, hidden, dtype=FP8)
        x[0, :128] = 0
        x[-1, -128:] = 448  # a scale that is one already
        scales = torch.empty_strided((rows, hidden // 128), (1, -(-rows // 4) * 4))

        def run(input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor, eps: float, **_: Any) -> None:
            groups = input.float().view(len(input), -1, 128)
            output_s.copy_(power_of_two((groups.abs().amax(-1).clamp(min=eps) / 448).clamp(min=1e-10)))
            output_q.copy_(to_fp8(groups, output_s[..., None]).view_as(input))

        limits = {"group_size": 128, "eps": 1e-10, "fp8_min": -448.0, "fp8_max": 448.0, "scale_ue8m0": True}
        layout = {"dummy_is_scale_transposed": True, "dummy_is_tma_aligned": True}
        kernel = agrees("_C::per_token_group_fp8_quant", run, input=x, output_q=q, output_s=scales, **limits, **layout)
        assert kernel.name == f"quantize_per_group_ue8m0_h{hidden}_g128"


def test_four_exponents_to_a_word():
    x, q = randn(5, 1024), torch.empty(5, 1024, dtype=FP8)
    words = torch.empty_strided((5, 2), (1, 8), dtype=torch.int32)

    def run(input: torch.Tensor, output_q: torch.Tensor, output_s_packed: torch.Tensor, **_: Any) -> None:
        groups = input.float().view(5, 8, 128)
        scale = power_of_two(groups.abs().amax(-1) / 448)
        output_q.copy_(to_fp8(groups, scale[..., None]).view_as(input))
        exponents = (torch.log2(scale).round().int() + 127).tolist()
        for row, values in enumerate(exponents):
            for word in range(2):
                output_s_packed[row, word] = sum(values[4 * word + i] << 8 * i for i in range(4))

    limits = {"group_size": 128, "eps": 1e-10, "fp8_min": -448.0, "fp8_max": 448.0}
    packed = {"input": x, "output_q": q, "output_s_packed": words}
    kernel = agrees("_C::per_token_group_fp8_quant_packed", run, **packed, **limits)
    assert kernel.name == "quantize_per_group_ue8m0_packed_h1024_g128"
    three = {"input": x[:, :384], "output_q": q[:, :384], "output_s_packed": words[:, :1]}
    assert declined("_C::per_token_group_fp8_quant_packed", **three, **limits)


def triton_kernel(name: str, q: str, grid: tuple[int, ...]) -> Callable[..., None]:
    """vLLM's kernel, which writes float32 to `q`: Triton's interpreter cuts digits off where a GPU rounds to float8."""
    launcher: Launcher = kernels("vllm", "model_executor/layers/quantization/utils/fp8_utils.py")[name]

    def run(**call_arguments: Any) -> None:
        unrounded = torch.empty(call_arguments[q].shape)
        launcher[grid](**{**call_arguments, q: unrounded})
        call_arguments[q].copy_(unrounded.to(FP8))

    return run


WHOLE = {"expert_ends_ptr": None, "alpha": 1.0, "beta": 0.0, "EXPERT_ALIGNMENT": 0}  # of vLLM 0.32: no experts' rows


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("by_column", [False, True])
def test_groups_as_vllms_triton_kernels_quantize_them(rounded: bool, by_column: bool):
    name = f"_per_token_group_quant_fp8{'_colmajor' if by_column else ''}"
    run = triton_kernel(name, "y_q_ptr", (12,))
    x, q = randn(6, 512)[:, :256], torch.empty(6, 256, dtype=FP8)
    x[2, 128:] = 0
    scales = torch.empty(2, 6).T if by_column else torch.empty(6, 2)
    strides = {"y_s_col_stride": 6} if by_column else {}
    sizes = {"group_size": 128, "y_num_columns": 256, "y_row_stride": 512, "eps": 1e-10}
    fixed = {"fp8_min": -448.0, "fp8_max": 448.0, "use_ue8m0": rounded, "BLOCK": 128}

    tensors = {"y_ptr": x, "y_q_ptr": q, "y_s_ptr": scales}
    kernel = agrees(f"triton::{name}.s12345678", run, **tensors, **sizes, **strides, **fixed)
    assert kernel.name == f"quantize_per_group{'_ue8m0' if rounded else ''}_h256_g128"


@pytest.mark.parametrize("rounded", [False, True])
def test_silu_and_mul_before_groups_as_vllms_triton_kernel_has_it(rounded: bool):
    name = "_silu_mul_per_token_group_quant_fp8_colmajor"
    run = triton_kernel(name, "y_q_ptr", (2, 2))
    x, q = randn(16, 512), torch.empty(16, 256, dtype=FP8)
    scales = torch.empty(2, 16).T
    sizes = {**WHOLE, "M": 16, "N": 512, "y_s_col_stride": 16, "eps": 1e-10, "clamp_limit": 0.0}
    fixed = {"fp8_min": -448.0, "fp8_max": 448.0, "use_ue8m0": rounded, "HAS_CLAMP": False}
    blocks = {"GROUP_SIZE": 128, "BLOCK_M": 8, "BLOCK_N": 128}

    tensors = {"y_ptr": x, "y_q_ptr": q, "y_s_ptr": scales}
    kernel = agrees(f"triton::{name}.s12345678", run, **tensors, **sizes, **fixed, **blocks)
    assert kernel.name == f"silu_and_mul_rounded_factors_quantize_per_group{'_ue8m0' if rounded else ''}_h256_g128"
    for other in ({"alpha": 1.702}, {"EXPERT_ALIGNMENT": 128}):
        assert declined(f"triton::{name}", **tensors, **{**sizes, **other}, **fixed, **blocks)
    assert declined(f"triton::{name}", **tensors, **sizes, **{**fixed, "HAS_CLAMP": True}, **blocks)


def test_silu_and_mul_before_packed_scales_as_vllms_triton_kernel_has_it():
    name = "_silu_mul_quant_fp8_packed_kernel"
    x, q = randn(6, 2048), torch.empty(6, 1024, dtype=FP8)
    words = torch.empty((2, 8), dtype=torch.int32).T[:6]
    tensors = {"input_ptr": x, "output_q_ptr": q, "output_scale_ptr": words}
    strides = {"input_stride_m": 2048, "output_q_stride_m": 1024, "output_scale_stride_k": 8}
    fixed = {"N": 2048, "GROUPS_PER_ROW": 8, "PACKS_PER_ROW": 2, "fp8_min": -448.0, "fp8_max": 448.0}
    blocks = {"GROUP_SIZE": 128, "PACKS_PER_CTA": 1, "BLOCK_M": 8, "HAS_CLAMP": False}
    rest = {**WHOLE, "M": 6, "clamp_limit": 0.0, **strides, **fixed, **blocks}
    kernel = agrees(f"triton::{name}", triton_kernel(name, "output_q_ptr", (2, 1)), **tensors, **rest)
    assert kernel.name == "silu_and_mul_rounded_product_quantize_per_group_ue8m0_packed_h1024_g128"


def test_what_vllms_compile_passes_fuse_with_silu_and_mul():
    x, q = randn(7, 512), torch.empty(7, 256, dtype=FP8)
    x[0] = 0
    silu = torch.nn.functional.silu(x[:, :256].double()) * x[:, 256:].double()

    def blocks(out: torch.Tensor, scales: torch.Tensor, **_: Any) -> None:
        groups = silu.view(7, -1, 128)
        scales.copy_((groups.abs().amax(-1) / 448).clamp(min=1 / (448 * 512)))
        out.copy_(to_fp8(groups, scales[..., None]).view(7, 256))

    layout = {"group_size": 128, "scale_ub": None, "is_scale_transposed": True}
    kernel = agrees("_C::silu_and_mul_per_block_quant", blocks, out=q, input=x, scales=torch.empty(2, 7).T, **layout)
    assert kernel.name == "silu_and_mul_quantize_per_group_h256_g128"
    assert kernel.tags == ("quantization:float8_e4m3fn", "fused")
    scale = torch.tensor([0.02])
    kernel = agrees(
        "_C::silu_and_mul_quant",
        lambda result, scale, **_: result.copy_(to_fp8(silu, scale)),
        result=q,
        input=x,
        scale=scale,
    )
    assert kernel.name == "silu_and_mul_quantize_per_tensor_static_h256"


def test_static_scales_are_inputs():
    x, q = torch.empty(8, 4096, dtype=torch.bfloat16, device="meta"), torch.empty(8, 4096, dtype=FP8, device="meta")
    given = {"result": q, "input": x, "scale": torch.ones(1), "group_shape": [-1, -1]}  # as vLLM 0.22.1 passes it
    definition = checked(kernel_of("_C::static_scaled_fp8_quant", **given))
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
    renamed = {name: value for name, value in grouped.items() if name != "eps"}
    of_older = kernel_of("sgl_kernel::sgl_per_token_group_quant_8bit", **grouped)
    of_newer = kernel_of("sglang::per_token_group_quant", **renamed, scale_ue8m0=False)
    assert (of_newer.name, of_newer.reference) == (of_older.name, of_older.reference)
    assert kernel_of("sglang::per_token_group_quant_8bit_v2", **grouped).name == of_older.name
    assert declined("sglang::per_token_group_quant", **renamed, sorted_token_ids=torch.ones(8).int())
    assert declined("sgl_kernel::sgl_per_token_group_quant_8bit", **{**grouped, "output_s": torch.ones(8, 1).int()})
    assert declined("sgl_kernel::sgl_per_token_group_quant_8bit", **{**grouped, "output_s": torch.ones(2, 8)})
    out = torch.empty(8, 256, dtype=torch.int8)
    assert declined("_C::static_scaled_int8_quant", out=out, input=x, scale=torch.ones(1), azp=torch.ones(1))

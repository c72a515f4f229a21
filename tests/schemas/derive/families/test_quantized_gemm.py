"""quantized_gemm: references against aten's operator and independent sums, names, what is declined."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn
from interpreted import kernels

FP8 = torch.float8_e4m3fn
SIZES = [(1, 16, 32), (16, 64, 48), (5, 32, 128), (64, 256, 64), (3, 16, 512)]


def quantized(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = FP8) -> torch.Tensor:
    values = randn(rows, columns, dtype=torch.float32, seed=seed)
    return (values * 20).round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else values.to(dtype)


def scales(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def test_references_are_atens_scaled_mm():
    run = torch.ops.aten._scaled_mm.default
    for seed, (m, n, k) in enumerate(SIZES):
        matrices = {"self": quantized(m, k, seed), "mat2": quantized(n, k, seed + 1).T}
        rest = {"bias": None, "scale_result": None, "out_dtype": torch.bfloat16}
        whole = agrees("aten::_scaled_mm", run, **matrices, scale_a=scales(1), scale_b=scales(1), **rest)
        assert whole.name == f"quantized_gemm_per_tensor_per_tensor_n{n}_k{k}"
        rows = agrees("aten::_scaled_mm", run, **matrices, scale_a=scales(m, 1), scale_b=scales(1, n), **rest)
        assert rows.name == f"quantized_gemm_per_token_per_channel_n{n}_k{k}"


def test_one_scale_for_b_and_one_for_each_token_of_a():
    """As vLLM calls its cutlass kernel on a model of float8 weights, a bias included."""
    for seed, (m, n, k) in enumerate(SIZES):
        a, b, bias = quantized(m, k, seed), quantized(n, k, seed + 1), randn(n)
        a_scales, b_scales, out = scales(m, 1), scales(1), torch.empty(m, n, dtype=torch.bfloat16)

        def run(out: torch.Tensor, a: Any, b: Any, a_scales: Any, b_scales: Any, bias: Any) -> None:
            out.copy_((a.double() @ b.double()) * a_scales * b_scales + bias)

        shared = {"a_scales": a_scales, "b_scales": b_scales, "bias": bias}
        kernel = agrees("_C::cutlass_scaled_mm", run, out=out, a=a, b=b.T, **shared)
        assert kernel.name == f"quantized_gemm_per_token_per_tensor_bias_n{n}_k{k}"


def by_blocks(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """The sum of each block's own product, times the block's two scales; `b`: [N, K]."""
    out = torch.zeros(len(a), len(b), dtype=torch.float64)
    for i in range(a_scale.shape[1]):
        columns = slice(128 * i, 128 * (i + 1))
        for j in range(b_scale.shape[0]):
            rows = slice(128 * j, 128 * (j + 1))
            part = a[:, columns].double() @ b[rows, columns].double().T
            out[:, rows] += part * a_scale[:, i : i + 1] * b_scale[j, i]
    return out.bfloat16()


@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 256), (7, 256, 384), (16, 384, 128), (5, 576, 512), (3, 200, 256)])
def test_blocks_of_128(m: int, n: int, k: int):
    a, b = quantized(m, k), quantized(n, k, 1)
    a_scale, b_scale = scales(m, k // 128), scales(-(-n // 128), k // 128)
    expected, out = by_blocks(a, b, a_scale, b_scale), torch.empty(m, n, dtype=torch.bfloat16)
    deep_gemm = agrees(
        "deep_gemm::fp8_gemm_nt",
        lambda a, b, d, c: d.copy_(expected),
        a=[a, a_scale],
        b=[b, b_scale],
        d=out,
        c=None,
    )
    flat = {"a": a, "a_sf": a_scale, "b": b, "b_sf": b_scale, "d": out, "c": None}  # where it is a library of operators
    assert kernel_of("deep_gemm::fp8_fp4_gemm_nt", **flat).name == deep_gemm.name
    if k > 128:
        assert deep_gemm.name == f"quantized_gemm_n{n}_k{k}_ng{-(-n // 128)}_kg{k // 128}"
    triton = agrees(
        "triton::_w8a8_triton_block_scaled_mm.s12345678",
        lambda A, B, C, As, Bs, M: C.copy_(expected),
        A=a,
        B=b,
        C=out,
        As=a_scale,
        Bs=b_scale,
        M=m,
    )
    assert triton.name == deep_gemm.name
    mats = {"mat_a": a, "mat_b": b.T, "scales_a": a_scale, "scales_b": b_scale.T, "out_dtype": torch.bfloat16}
    agrees("sgl_kernel::fp8_blockwise_scaled_mm", lambda **_: expected, **mats)


@pytest.mark.parametrize("function", ["fp8_gemm_nt", "fp8_fp4_gemm_nt"])
def test_deep_gemm_as_vllm_calls_it_on_hopper(function: str):
    """0.22.1: scales of A column by column, rows padded to four; `c` and `recipe` as pybind11 fills them in."""
    m, n, k = 6, 256, 384
    a, b, b_scale = quantized(m, k), quantized(n, k, 1), scales(2, 3)
    a_scale = torch.empty_strided((m, 3), (1, 8)).copy_(scales(m, 3))
    expected = by_blocks(a, b, a_scale, b_scale)
    rest = {"recipe": None, "recipe_a": None, "recipe_b": None, "compiled_dims": "nk", "disable_ue8m0_cast": False}
    out = torch.empty(m, n, dtype=torch.bfloat16)
    kernel = agrees(
        f"deep_gemm::{function}",
        lambda d, **_: d.copy_(expected),
        a=[a, a_scale],
        b=[b, b_scale],
        d=out,
        c=None,
        **rest,
    )
    assert kernel.name == "quantized_gemm_n256_k384_ng2_kg3"
    cutlass = {"out": out, "a": a, "b": b.T, "a_scales": a_scale, "b_scales": b_scale.T, "bias": None}
    assert agrees("_C::cutlass_scaled_mm", lambda out, **_: out.copy_(expected), **cutlass).key == kernel.key


def test_blocks_as_vllms_triton_kernel_has_them():
    kernel = kernels("vllm", "model_executor/layers/quantization/utils/fp8_utils.py")["_w8a8_triton_block_scaled_mm"]
    m, n, k = 5, 256, 384
    tensors = {"A": quantized(m, k), "B": quantized(n, k, 1), "C": torch.empty(m, n, dtype=torch.bfloat16)}
    tensors |= {"As": scales(m, 3), "Bs": scales(2, 3)}
    sizes = {"M": m, "N": n, "K": k, "group_n": 128, "group_k": 128}
    strides = {"stride_am": k, "stride_ak": 1, "stride_bk": 1, "stride_bn": k, "stride_cm": n, "stride_cn": 1}
    strides |= {"stride_As_m": 3, "stride_As_k": 1, "stride_Bs_k": 1, "stride_Bs_n": 3}
    blocks = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 32}

    def run(A: torch.Tensor, B: torch.Tensor, **rest: Any) -> None:
        kernel[2,](A=A.float(), B=B.float(), **rest)  # the interpreter has no products of float8

    agrees("triton::_w8a8_triton_block_scaled_mm", run, **tensors, **sizes, **strides, **blocks)


def returned(value: torch.Tensor, **_: Any) -> torch.Tensor:
    return value


def test_flashinfer_quantizes_on_its_way():
    """Against the two kernels that it stands for."""
    for seed, (m, n, k) in enumerate([(1, 128, 256), (7, 256, 384), (31, 200, 128)]):
        a, b, b_scale = randn(m, k, seed=seed), quantized(n, k, 1), scales(-(-n // 128), k // 128)
        q, a_scale = torch.empty(m, k, dtype=FP8), torch.empty(m, k // 128)
        for row in range(m):
            for group in range(k // 128):
                part = a[row, 128 * group : 128 * (group + 1)].double()
                a_scale[row, group] = part.abs().max() / 448
                q[row, 128 * group : 128 * (group + 1)] = (part / a_scale[row, group]).to(FP8)
        expected = by_blocks(q, b, a_scale, b_scale)
        pair = {"input": a, "weight": b, "input_scale": None, "weight_scale": b_scale}
        settings = {"out": None, "out_dtype": torch.bfloat16}
        run = partial(returned, expected)
        kernel = agrees("flashinfer::fp8_blockscale_gemm_sm90", run, **pair, **settings)
        assert kernel.name == f"quantized_gemm_dynamic_n{n}_k{k}_ng{-(-n // 128)}_kg{k // 128}"
        assert declined("flashinfer::fp8_blockscale_gemm_sm90", **{**pair, "input_scale": a_scale}, **settings)


def test_as_many_blocks_as_channels_are_blocks():
    """DeepSeek-V3's o_proj: 56 by 128 scales for 7168 channels."""
    a, b, d = (
        torch.empty(s, dtype=t, device="meta")
        for s, t in (((7, 16384), FP8), ((256, 16384), FP8), ((7, 256), torch.bfloat16))
    )
    a_scale, b_scale = scales(7, 128), scales(2, 128)
    kernel = kernel_of("deep_gemm::fp8_gemm_nt", a=[a, a_scale], b=[b, b_scale], d=d, c=None)
    assert kernel.name == "quantized_gemm_n256_k16384_ng2_kg128"
    mats = {"mat_a": a, "mat_b": b.T, "scales_a": a_scale, "scales_b": b_scale.T, "out_dtype": torch.bfloat16}
    assert kernel_of("sgl_kernel::fp8_blockwise_scaled_mm", **mats).key == kernel.key


def test_int8_of_sglang():
    a, b = quantized(5, 64, dtype=torch.int8), quantized(32, 64, 1, torch.int8)
    mats = {"mat_a": a, "mat_b": b.T, "scales_a": scales(5, 1), "scales_b": scales(32, 1), "out_dtype": torch.float16}

    def run(mat_a: Any, mat_b: Any, scales_a: Any, scales_b: Any, out_dtype: Any, bias: Any) -> torch.Tensor:
        return ((mat_a.long() @ mat_b.long()).double() * scales_a * scales_b.T).to(out_dtype)

    kernel = agrees("sgl_kernel::int8_scaled_mm", run, **mats, bias=None)
    assert kernel.name == "quantized_gemm_per_token_per_channel_int8_fp16_n32_k64"
    assert kernel.tags == ("quantization:int8",)


def test_names_of_llama():
    a, b, out = (
        torch.empty(s, dtype=d, device="meta")
        for s, d in (((128, 4096), FP8), ((6144, 4096), FP8), ((128, 6144), torch.bfloat16))
    )
    call_arguments = {"out": out, "a": a, "b": b.T, "a_scales": scales(128, 1), "b_scales": scales(1), "bias": None}
    definition = checked(kernel_of("_C::cutlass_scaled_mm", **call_arguments))
    assert definition.name == "quantized_gemm_per_token_per_tensor_n6144_k4096"
    assert definition.inputs["A_scale"].shape == ["M"] and definition.inputs["B_scale"].shape == []
    assert definition.tags == ["quantization:float8_e4m3fn"]
    decode = {**call_arguments, "out": out[:1], "a": a[:1], "a_scales": scales(1, 1)}
    assert kernel_of("_C::cutlass_scaled_mm", **decode).key == kernel_of("_C::cutlass_scaled_mm", **call_arguments).key


def test_what_is_not_modelled_is_declined():
    a, b, d = quantized(4, 256), quantized(128, 256), torch.empty(4, 128, dtype=torch.bfloat16)
    packed = torch.ones(4, 1, dtype=torch.int32)
    assert declined("deep_gemm::fp8_gemm_nt", a=[a, packed], b=[b, scales(1, 2)], d=d, c=None)
    assert declined("deep_gemm::fp8_gemm_nt", a=[a, scales(4, 2)], b=[b, scales(1, 2)], d=d, c=d)
    assert declined("deep_gemm::fp8_gemm_nt", a=a, b=b, d=d, c=None)
    assert declined("deep_gemm::fp8_gemm_nt", a=[a, scales(4, 3)], b=[b, scales(1, 2)], d=d, c=None)
    whole = {"scale_a": scales(1), "scale_b": scales(1), "bias": None, "out_dtype": torch.bfloat16}
    assert declined("aten::_scaled_mm", self=a, mat2=b.T, scale_result=scales(1), **whole)
    assert declined("aten::_scaled_mm", self=a.bfloat16(), mat2=b.T.bfloat16(), **whole)


def test_a_weight_of_four_bits_is_no_product_of_float8():
    a, d = quantized(4, 256), torch.empty(4, 256, dtype=torch.bfloat16)
    packed = torch.zeros(256, 128, dtype=torch.int8)
    assert declined("deep_gemm::fp8_fp4_gemm_nt", a=[a, scales(4, 2)], b=[packed, scales(2, 2)], d=d, c=None)

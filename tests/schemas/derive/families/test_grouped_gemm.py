"""grouped_gemm: against aten's operator and group by group; padding; names, what is declined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn

SIZES = [(1, 2, 32, 64), (17, 3, 64, 32), (64, 4, 16, 128), (40, 8, 96, 48), (5, 5, 16, 16)]


def ends(rows: int, groups: int, seed: int, spare: int = 0) -> torch.Tensor:
    """Where groups end, some of them empty; `spare` rows belong to none."""
    inner = torch.randint(0, rows - spare + 1, (groups - 1,), generator=torch.Generator().manual_seed(seed))
    return torch.cat([inner.sort().values, torch.tensor([rows - spare])]).int()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reference_is_atens_operator(dtype: torch.dtype):
    run = torch.ops.aten._grouped_mm.default
    for seed, (m, g, n, k) in enumerate(SIZES):
        a, b = randn(m, k, dtype=dtype, seed=seed), randn(g, n, k, dtype=dtype, seed=seed + 1)
        agrees("aten::_grouped_mm", run, self=a, mat2=b.transpose(1, 2), offs=ends(m, g, seed, spare=m // 8))


def scales(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def spread(matrix: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
    """`matrix` with each block of `rows` by 128 times its scale, in float64; the last of each may be short."""
    row = torch.arange(matrix.shape[-2]) // rows
    column = torch.arange(matrix.shape[-1]) // 128
    return matrix.double() * scale[..., row[:, None], column[None, :]]


@pytest.mark.parametrize("quantized", [False, True])
def test_contiguous_groups_of_deep_gemm(quantized: bool):
    for seed, (m, g, n, k) in enumerate([(8, 2, 128, 256), (33, 3, 192, 384), (16, 4, 256, 256), (5, 1, 64, 512)]):
        a, b = randn(m, k, seed=seed), randn(g, n, k, seed=seed + 1)
        ids = torch.randint(-1, g, (m,), generator=torch.Generator().manual_seed(seed)).sort().values.int()
        sa, sb = scales(m, k // 128), scales(g, -(-n // 128), k // 128)
        if quantized:
            a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)

        def run(a: Any, b: Any, d: torch.Tensor, m_indices: torch.Tensor) -> None:
            left = spread(*a, 1) if quantized else a.double()
            right = spread(*b, 128) if quantized else b.double()
            for i, group in enumerate(m_indices.tolist()):
                if group >= 0:
                    d[i] = (right[group] @ left[i]).to(d.dtype)

        name = f"deep_gemm::m_grouped_{'fp8' if quantized else 'bf16'}_gemm_nt_contiguous"
        pairs = {"a": [a, sa], "b": [b, sb]} if quantized else {"a": a, "b": b}
        kernel = agrees(name, run, **pairs, d=torch.full((m, n), 7.0, dtype=torch.bfloat16), m_indices=ids)
        assert kernel.name == f"{'quantized_' if quantized else ''}grouped_gemm_by_group_ids_g{g}_n{n}_k{k}"
        if quantized:
            flat = {"a": a, "a_sf": sa, "b": b, "b_sf": sb, "d": torch.empty(m, n, dtype=torch.bfloat16)}
            assert kernel_of(name, **flat, m_indices=ids).name == kernel.name


def test_masked_groups_of_deep_gemm():
    for seed, (m, g, n, k) in enumerate([(8, 2, 128, 256), (33, 3, 192, 384), (16, 4, 256, 256), (5, 1, 64, 512)]):
        a, b = (randn(*shape, seed=seed).to(torch.float8_e4m3fn) for shape in ((g, m, k), (g, n, k)))
        sa, sb = scales(g, m, k // 128), scales(g, -(-n // 128), k // 128)
        counts = torch.randint(0, m + 1, (g,), generator=torch.Generator().manual_seed(seed)).int()

        def run(a: Any, b: Any, d: torch.Tensor, masked_m: torch.Tensor, expected_m: int) -> None:
            for group, count in enumerate(masked_m.tolist()):
                product = spread(a[0][group], a[1][group], 1) @ spread(b[0][group], b[1][group], 128).T
                d[group, :count] = product[:count].to(d.dtype)

        out = torch.full((g, m, n), float("nan"), dtype=torch.bfloat16)
        pairs = {"a": [a, sa], "b": [b, sb]}
        agrees("deep_gemm::m_grouped_fp8_gemm_nt_masked", run, **pairs, d=out, masked_m=counts, expected_m=m)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_experts_by_cutlass_as_vllm_calls_it(per_row: bool, swapped: bool):
    """Experts 0 and 2 of four have rows; `swapped`: for few tokens rows and N change places in `problem_sizes`."""
    m, g, n, k = 7, 4, 32, 256
    a, b = (randn(*shape, seed=1).to(torch.float8_e4m3fn) for shape in ((m, k), (g, n, k)))
    a_scales, b_scales = (scales(m, 1), scales(g, n, 1)) if per_row else (scales(1), scales(g))
    counts, starts = torch.tensor([3, 0, 4, 0]), torch.tensor([0, 3, 3, 7])
    columns = (torch.full((g,), n), counts) if swapped else (counts, torch.full((g,), n))
    sizes = torch.stack([*columns, torch.full((g,), k)], dim=1).int()

    def run(out_tensors: torch.Tensor, **_: Any) -> None:
        for row in range(m):
            expert = 0 if row < 3 else 2
            scale = a_scales.flatten()[row if per_row else 0].double() * b_scales[expert].flatten().double()
            out_tensors[row] = (b[expert].double() @ a[row].double()) * scale

    strides = {name: torch.full((g,), k) for name in ("a_strides", "b_strides", "c_strides")}
    tensors = {"a_tensors": a, "b_tensors": b, "a_scales": a_scales, "b_scales": b_scales, "expert_offsets": starts}
    flags = {"per_act_token": per_row, "per_out_ch": per_row}
    out = torch.full((m, n), 7.0, dtype=torch.bfloat16)
    call_arguments = {"out_tensors": out, **tensors, "problem_sizes": sizes, **strides, **flags}
    kernel = agrees("_C::cutlass_moe_mm", run, **call_arguments)
    assert kernel.name == f"quantized_grouped_gemm_by_group_ends_g{g}_n{n}_k{k}"
    assert callable(kernel.flops) and kernel.flops() == 2 * m * n * k
    gaps = {**call_arguments, "expert_offsets": torch.tensor([0, 8, 16, 24])}  # batched experts
    assert declined("_C::cutlass_moe_mm", **gaps)


def test_names_and_what_is_declined():
    a, b, offs = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((256, 2048), (128, 2048, 1536), (128,))
    )
    definition = checked(kernel_of("aten::_grouped_mm", self=a, mat2=b, offs=offs.int()))
    assert definition.name == "grouped_gemm_by_group_ends_g128_n1536_k2048"
    assert definition.var_axes == ["M"]
    assert declined("aten::_grouped_mm", self=a, mat2=b, offs=None)
    assert declined("aten::_grouped_mm", self=a, mat2=b, offs=offs.int(), bias=a)
    assert declined("deep_gemm::m_grouped_bf16_gemm_nt_contiguous", a=a, b=b, d=a, m_indices=None)
    packed = torch.ones(256, 4, dtype=torch.int32)
    fp8 = [a.to(torch.float8_e4m3fn), packed], [b.transpose(1, 2).to(torch.float8_e4m3fn), packed]
    ids = torch.zeros(256, dtype=torch.int32)
    assert declined("deep_gemm::m_grouped_fp8_gemm_nt_contiguous", a=fp8[0], b=fp8[1], d=a, m_indices=ids)

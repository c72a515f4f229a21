"""gemm and bmm: names, references against aten's and vLLM's CPU operators, what is declined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, needs_avx512, randn

SIZES = [(1, 16, 32), (5, 64, 48), (17, 33, 128), (64, 256, 64), (3, 8, 512)]
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_references_are_atens_operators(dtype: torch.dtype):
    aten = torch.ops.aten
    for seed, (m, n, k) in enumerate(SIZES):
        a, b, bias = randn(m, k, dtype=dtype, seed=seed), randn(n, k, dtype=dtype), randn(n, dtype=dtype)
        agrees("aten::linear", aten.linear.default, input=a, weight=b, bias=None)
        agrees("aten::linear", aten.linear.default, input=a, weight=b, bias=bias)
        agrees("aten::mm", aten.mm.default, self=a, mat2=b.T)
        agrees("aten::matmul", aten.matmul.default, self=a.view(1, m, k), other=b.T)
        agrees("aten::addmm", aten.addmm.default, self=bias, mat1=a, mat2=b.T)
        agrees("aten::mm.out", aten.mm.out, self=a, mat2=b.T, out=torch.empty(m, n, dtype=dtype))
        batched = randn(3, k, n, dtype=dtype)
        agrees("aten::bmm", aten.bmm.default, self=randn(3, m, k, dtype=dtype, seed=seed), mat2=batched)


@needs_avx512
def test_reference_is_vllms_onednn_operator():
    load_vllm_kernels()
    for seed, (m, n, k) in enumerate([(1, 32, 64), (5, 64, 48), (17, 96, 128), (64, 256, 64), (3, 8, 512)]):
        a, weight, bias = randn(m, k, seed=seed), randn(n, k), randn(n)
        handler = torch.tensor(torch.ops._C.create_onednn_mm_handler(weight.t(), 1))
        for added in (None, bias):
            _onednn(a, weight, added, handler)
        torch.ops._C.release_dnnl_matmul_handler(handler.item())


def _onednn(a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, handler: torch.Tensor) -> None:
    c = torch.empty(len(a), len(weight), dtype=a.dtype)
    agrees(
        "_C::onednn_mm",
        torch.ops._C.onednn_mm,
        hidden={"weight": weight},
        c=c,
        a=a,
        bias=bias,
        handler_tensor=handler,
    )


def test_names_of_llama():
    a, b = meta(64, 4096), meta(6144, 4096)
    definition = checked(kernel_of("aten::linear", input=a, weight=b, bias=None))
    assert definition.name == "gemm_bf16_n6144_k4096"
    assert definition.var_axes == ["M"] and definition.const_axes == {"N": 6144, "K": 4096}
    assert kernel_of("aten::linear", input=a.half(), weight=b.half()).name == "gemm_n6144_k4096"
    assert kernel_of("aten::linear", input=a, weight=b, bias=meta(6144)).name == "gemm_bias_bf16_n6144_k4096"
    assert kernel_of("aten::bmm", self=meta(16, 7, 128), mat2=meta(16, 128, 512)).name == "bmm_n512_k128"


def test_a_router_gemm_may_write_another_dtype():
    x, weight, out = randn(4, 64), randn(16, 64), torch.empty(4, 16)

    def run(output: torch.Tensor, mat_a: torch.Tensor, mat_b: torch.Tensor) -> None:
        output.copy_(mat_a.float() @ mat_b.float().T)

    kernel = agrees("sgl_kernel::dsv3_router_gemm", run, output=out, mat_a=x, mat_b=weight)
    assert kernel.name == "gemm_bf16_to_fp32_n16_k64"
    assert kernel.outputs["C"].dtype == "float32"

    def route(hidden_states: torch.Tensor, router_weights: torch.Tensor, output: torch.Tensor) -> None:
        run(output, hidden_states, router_weights)

    names = {"hidden_states": x, "router_weights": weight, "output": out}
    assert agrees("sglang::dsv3_router_gemm", route, **names).reference == kernel.reference


@pytest.mark.parametrize(
    ("weight", "out", "word"),
    [
        (torch.bfloat16, torch.bfloat16, ""),
        (torch.bfloat16, torch.float32, "_to_fp32"),
        (torch.float32, torch.float32, "_b_fp32_to_fp32"),
    ],
)
def test_sglangs_tiny_gemm_may_have_a_float32_weight(weight: torch.dtype, out: torch.dtype, word: str):
    """Its weight is not rounded to the dtype of the activation."""
    arguments = {"x": randn(4, 64), "w": randn(16, 64, dtype=weight), "out": torch.empty(4, 16, dtype=out)}

    def run(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, **_: int) -> None:
        out.copy_(x.double() @ w.double().T)

    kernel = agrees("sglang::tiny_gemm_bf16", run, **arguments, max_m=16, n_split=4)
    assert kernel.name == f"gemm_bf16{word}_n16_k64"
    assert kernel.operator.hints == ("max_m", "n_split")


def write_linear(
    input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, use_pdl: bool
) -> None:
    out.copy_(torch.nn.functional.linear(input, weight, bias))


def test_operators_of_other_libraries_name_their_matrices_otherwise():
    a, b, d = randn(4, 64), randn(32, 64), torch.empty(4, 32, dtype=torch.bfloat16)

    def write(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: Any = None) -> None:
        d.copy_(a @ b.T)

    agrees("deep_gemm::bf16_gemm_nt", write, a=a, b=b, d=d, c=None)
    agrees("flashinfer::mm_bf16", lambda a, b, bias: a @ b + bias, a=a, b=b.T, bias=randn(32))
    for bias in (randn(32), None):
        agrees("flashinfer::tinygemm_bf16", write_linear, input=a, weight=b, out=d, bias=bias, use_pdl=True)
    agrees(
        "sgl_kernel::dsv3_fused_a_gemm",
        lambda output, mat_a, mat_b: output.copy_(mat_a @ mat_b),
        output=d,
        mat_a=a,
        mat_b=b.T,
    )


def test_what_is_no_gemm_is_declined():
    a, b = meta(4, 64), meta(32, 64)
    assert declined("aten::mm", self=a.int(), mat2=b.T.int())
    assert declined("aten::mm", self=a, mat2=b.T.half())
    assert declined("aten::matmul", self=a, other=meta(2, 64, 8))
    assert declined("aten::addmm", self=meta(32), mat1=a, mat2=b.T, beta=2, alpha=1)
    assert declined("aten::addmm", self=meta(4, 32), mat1=a, mat2=b.T)
    assert declined("aten::linear", input=a.to(torch.float8_e4m3fn), weight=b.to(torch.float8_e4m3fn))
    assert declined("_C::weight_packed_linear", out=meta(4, 32), mat1=a, mat2=b, bias=None, is_vnni=True)
    assert declined("deep_gemm::bf16_gemm_nt", a=a, b=b, d=meta(4, 32), c=meta(4, 32))


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")

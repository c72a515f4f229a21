"""rmsnorm, fused_add_rmsnorm and Gemma's: names, references against vLLM's and aten's operators, what is declined."""

from __future__ import annotations

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, randn

SIZES = [(1, 64), (7, 128), (16, 96), (33, 1024), (5, 4096)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_references_are_vllms_cpu_operators(dtype: torch.dtype):
    load_vllm_kernels()
    for seed, (rows, hidden) in enumerate(SIZES):
        x, residual, weight = (randn(*shape, dtype=dtype, seed=seed) for shape in ((rows, hidden),) * 2 + ((hidden,),))
        out = torch.empty_like(x)
        agrees("_C::rms_norm", torch.ops._C.rms_norm, out=out, input=x, weight=weight, epsilon=1e-5)
        agrees(
            "_C::fused_add_rms_norm",
            torch.ops._C.fused_add_rms_norm,
            input=x,
            residual=residual,
            weight=weight,
            epsilon=1e-6,
        )


def test_references_are_vllms_ir_operators():
    pytest.importorskip("vllm.ir.ops")
    for seed, (rows, hidden) in enumerate(SIZES):
        x, residual, weight = randn(rows, hidden, seed=seed), randn(rows, hidden, seed=9), randn(hidden, seed=seed)
        shared = {"weight": weight, "epsilon": 1e-5, "variance_size": None}
        agrees("vllm_ir::rms_norm", torch.ops.vllm_ir.rms_norm.default, x=x, **shared)
        run = torch.ops.vllm_ir.fused_add_rms_norm.default
        agrees("vllm_ir::fused_add_rms_norm", run, x=x, x_residual=residual, **shared)


@pytest.mark.parametrize("eps", [1e-6, None])
def test_references_are_atens_operators(eps: float | None):
    for seed, (rows, hidden) in enumerate(SIZES):
        x, weight = randn(rows, hidden, seed=seed), randn(hidden, seed=seed)
        for name in ("rms_norm", "_fused_rms_norm"):
            run = getattr(torch.ops.aten, name).default
            agrees(f"aten::{name}", run, input=x, normalized_shape=[hidden], weight=weight, eps=eps)


def test_heads_are_rows():
    """Qwen3 norms each head of its queries, which lie in one matrix with the keys and values."""
    qkv, weight = randn(5, 6144), randn(128)
    q = qkv[:, :4096].view(5, 32, 128)

    def run(out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: bool) -> None:
        out.copy_(torch.nn.functional.rms_norm(input.float(), [128], weight.float(), eps))

    kernel = agrees(
        "sgl_kernel::rmsnorm", run, out=torch.empty_like(q), input=q, weight=weight, eps=1e-6, enable_pdl=False
    )
    assert kernel.sizes() == {"batch_size": 160, "hidden_size": 128}
    assert kernel.name == "rmsnorm_eps1e-06_h128"


def test_sglangs_operators_on_a_cpu_are_the_same():
    """One returns, the other writes both tensors."""
    x, residual, weight = randn(7, 128), randn(7, 128, seed=1), randn(128)

    def normed(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.nn.functional.rms_norm(input.float(), [128], weight.float(), eps).to(input.dtype)

    def fused(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        residual.add_(input)
        input.copy_(normed(residual, weight, eps))

    agrees("sgl_kernel::rmsnorm_cpu", normed, input=x, weight=weight, eps=1e-5)
    agrees("sgl_kernel::fused_add_rmsnorm_cpu", fused, input=x, residual=residual, weight=weight, eps=1e-5)


def test_gemma_adds_one_to_the_weight():
    x, residual, weight = randn(4, 64), randn(4, 64, seed=1), randn(64)

    def gemma(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x.float(), [64], 1 + weight.float(), 1e-6).to(x.dtype)

    def fused(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        residual.add_(input)
        input.copy_(gemma(residual, weight))

    kernel = agrees(
        "flashinfer::gemma_rmsnorm", lambda input, weight, eps: gemma(input, weight), input=x, weight=weight, eps=1e-6
    )
    assert kernel.name == "gemma_rmsnorm_eps1e-06_h64"
    both = {"residual": residual, "weight": weight}
    kernel = agrees("sgl_kernel::gemma_fused_add_rmsnorm", fused, input=x.clone(), eps=1e-6, **both)
    assert kernel.name == "gemma_fused_add_rmsnorm_eps1e-06_h64"
    region = kernel_of("vllm_custom_op::gemma_rms_norm", x=x, variance_epsilon=1e-6, **both)
    assert (region.name, list(region.outputs)) == (kernel.name, ["output", "residual_out"])
    assert list(kernel_of("vllm_custom_op::gemma_rms_norm", x=x, weight=weight, variance_epsilon=1e-6).outputs) == [
        "output"
    ]


def test_names_of_llama():
    x, weight = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((256, 4096), (4096,)))
    definition = checked(kernel_of("_C::rms_norm", result=x, input=x, weight=weight, epsilon=1e-5))
    assert definition.name == "rmsnorm_h4096" and definition.op_type == "rmsnorm"
    fused = checked(kernel_of("_C::fused_add_rms_norm", input=x, residual=x, weight=weight, epsilon=1e-5))
    assert fused.name == "fused_add_rmsnorm_h4096"
    assert list(fused.inputs) == ["hidden_states", "residual", "weight"]
    assert list(fused.outputs) == ["output", "residual_out"]


def test_what_is_not_modelled_is_declined():
    x, weight = randn(4, 64), randn(64)
    assert declined("vllm_ir::rms_norm", x=x, weight=weight, epsilon=1e-5, variance_size=32)
    assert declined("_C::rms_norm", out=x, input=x, weight=None, epsilon=1e-5)
    assert declined("_C::rms_norm", out=x, input=x, weight=randn(32), epsilon=1e-5)
    assert declined("aten::rms_norm", input=x, normalized_shape=[4, 64], weight=x, eps=1e-5)


def test_functions_of_tvm_ffis_modules_are_told_by_where_the_weight_is():
    """FlashInfer gives the output first, SGLang after the weight; neither names its arguments."""
    x, residual, weight = randn(7, 128), randn(7, 128, seed=1), randn(128)

    def normed(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x.float(), [128], weight.float(), 1e-5).to(x.dtype)

    def flashinfer(arg0: torch.Tensor, arg1: torch.Tensor, **_: object) -> None:
        arg0.copy_(normed(arg1))

    def sglang(arg0: torch.Tensor, arg2: torch.Tensor, **_: object) -> None:
        arg2.copy_(normed(arg0))

    def fused(arg0: torch.Tensor, arg1: torch.Tensor, **_: object) -> None:
        arg1.add_(arg0)
        arg0.copy_(normed(arg1))

    out = torch.empty_like(x)
    kernel = agrees("tvm::rmsnorm", flashinfer, arg0=out, arg1=x, arg2=weight, arg3=1e-5, arg4=False)
    assert kernel.name == "rmsnorm_h128"
    agrees("tvm::rmsnorm", sglang, arg0=x, arg1=weight, arg2=torch.empty_like(x), arg3=1e-5)
    kernel = agrees("tvm::fused_add_rmsnorm", fused, arg0=x.clone(), arg1=residual, arg2=weight, arg3=1e-5)
    assert (kernel.name, kernel.family) == ("fused_add_rmsnorm_h128", "fused_add_rmsnorm")
    assert kernel_of("tvm::gemma_rmsnorm", arg0=out, arg1=x, arg2=weight, arg3=1e-5).name == "gemma_rmsnorm_h128"
    assert declined("tvm::rmsnorm", arg0=x, arg1=x, arg2=x, arg3=1e-5)
    assert declined("tvm::rmsnorm", arg0=out, arg1=x, arg2=weight)

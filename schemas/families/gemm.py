"""gemm: C = A @ B.T, as linear layers call it. Operators of aten, vLLM (oneDNN on CPU) and SGLang."""

from __future__ import annotations

import torch

from kcap.schemas.families import family
from kcap.schemas.families.form import Form, Slot, abbreviate, made, of
from kcap.schemas.families.invocation import Invocation, Unrecognized

REFERENCE = """import torch


@torch.no_grad()
def run(A, B):
    assert B.shape == ({n}, {k})
    return torch.matmul(A, B.T)
"""
WITH_BIAS = """import torch


@torch.no_grad()
def run(A, B, bias):
    assert B.shape == ({n}, {k})
    return (torch.matmul(A.to(torch.float32), B.to(torch.float32).T) + bias.to(torch.float32)).to(A.dtype)
"""


@family("gemm", "aten::linear")
def linear(call: Invocation) -> Form:
    return gemm(call, call.tensor("input"), call.tensor("weight"), call.optional("bias"))


@family("gemm", "aten::mm")
def mm(call: Invocation) -> Form:
    return gemm(call, call.tensor("self"), call.tensor("mat2").transpose(0, 1))


@family("gemm", "aten::addmm")
def addmm(call: Invocation) -> Form:
    bias = call.tensor("self")
    if call["alpha"] not in (None, 1) or call["beta"] not in (None, 1) or bias.dim() != 1:
        raise Unrecognized("not a bias added once")
    return gemm(call, call.tensor("mat1"), call.tensor("mat2").transpose(0, 1), bias)


@family("gemm", "_C::onednn_mm")
def onednn_mm(call: Invocation) -> Form:
    a, c = call.tensor("a"), call.tensor("c")
    weight = call.weight("weight", (c.shape[-1], a.shape[-1]), a.dtype)
    return gemm(call, a, weight, call.optional("bias"))


def gemm(call: Invocation, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> Form:
    """`a`: [..., K], leading dimensions joined; `b`: [N, K]; `bias`: [N]."""
    if b.dim() != 2 or a.dtype != b.dtype or not a.is_floating_point():
        raise Unrecognized("not a product of two matrices of floats")
    a = a.reshape(-1, a.shape[-1])
    (m, k), n = a.shape, b.shape[0]
    inputs: dict[str, Slot] = {"A": of(a, "M", "K"), "B": of(b, "N", "K")}
    if bias is not None:
        inputs["bias"] = of(bias, "N")
    word = f"{'_bias' if bias is not None else ''}{abbreviate(a.dtype, torch.float16)}"
    return Form(
        name=f"gemm{word}_n{n}_k{k}",
        op_type="gemm",
        axes={"M": None, "N": n, "K": k},
        inputs=inputs,
        outputs={"C": made(a.dtype, ("M", "N"), lambda: written(call, "out", "c").reshape(-1, n))},
        reference=(REFERENCE if bias is None else WITH_BIAS).format(n=n, k=k),
        description=f"General matrix multiply, C = A @ B.T{' + bias' if bias is not None else ''}.",
        flops=2 * m * n * k,
    )


def written(call: Invocation, *names: str) -> torch.Tensor:
    """The argument of one of these names that the operator wrote, or else what it returned."""
    found = call.optional(*names)
    return call.result if found is None else found

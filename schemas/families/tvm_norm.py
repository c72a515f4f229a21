"""rmsnorm as functions of tvm-ffi's modules: FlashInfer's and SGLang's, which name no argument and differ in order.

FlashInfer: `rmsnorm(out, input, weight, eps, …)`; SGLang: `rmsnorm(input, weight, out, eps)`. Both:
`fused_add_rmsnorm(input, residual, weight, eps, …)`.
"""

from __future__ import annotations

import torch

from kcap.schemas.families import family
from kcap.schemas.families.form import Form
from kcap.schemas.families.invocation import Invocation, Unrecognized
from kcap.schemas.families.rmsnorm import in_place, norm


@family("rmsnorm", "tvm::rmsnorm")
def rms_norm(call: Invocation) -> Form:
    first, second, third = _tensors(call)
    x, weight, out = (first, second, third) if second.dim() == 1 else (second, third, first)
    return norm(_named(call, input=x, weight=weight), x, lambda: out)


@family("rmsnorm", "tvm::gemma_rmsnorm")
def gemma_rms_norm(call: Invocation) -> Form:
    """FlashInfer's alone."""
    out, x, weight = _tensors(call)
    return norm(_named(call, input=x, weight=weight), x, lambda: out, kind="gemma_")


@family("fused_add_rmsnorm", "tvm::fused_add_rmsnorm")
def fused_add_rms_norm(call: Invocation) -> Form:
    return _fused(call, "")


@family("fused_add_rmsnorm", "tvm::gemma_fused_add_rmsnorm")
def gemma_fused_add_rms_norm(call: Invocation) -> Form:
    return _fused(call, "gemma_")


def _fused(call: Invocation, kind: str) -> Form:
    x, residual, weight = _tensors(call)
    return in_place(_named(call, input=x, residual=residual, weight=weight), kind)


def _tensors(call: Invocation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first, second, third = (call.tensor(f"arg{place}") for place in range(3))
    if [one.dim() for one in (first, second, third)].count(1) != 1:
        raise Unrecognized("it has not one weight")
    return first, second, third


def _named(call: Invocation, **tensors: torch.Tensor) -> Invocation:
    return Invocation(call.operator, {**tensors, "eps": call.number("arg3")}, result=call.result)

"""rmsnorm and fused_add_rmsnorm (Zhang and Sennrich, arXiv:1910.07467), with FlashInfer-Bench's names.

vLLM's and SGLang's operators take the weight as it is; Gemma's add one to it and are other operators.
"""

from __future__ import annotations

import torch

from kcap.schemas.families import family
from kcap.schemas.families.form import Form, Slot, abbreviate, made, of
from kcap.schemas.families.gemm import written
from kcap.schemas.families.invocation import Invocation, Unrecognized

REFERENCE = """import torch


@torch.no_grad()
def run(hidden_states, weight):
    assert hidden_states.shape[-1] == {h}
    x = hidden_states.to(torch.float32)
    y = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + {eps!r})
    return (y * weight.to(torch.float32)).to(hidden_states.dtype)
"""
FUSED = """import torch


@torch.no_grad()
def run(hidden_states, residual, weight):
    assert hidden_states.shape[-1] == {h}
    x = hidden_states.to(torch.float32) + residual.to(torch.float32)
    y = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + {eps!r})
    return (y * weight.to(torch.float32)).to(hidden_states.dtype), x.to(residual.dtype)
"""


@family("rmsnorm", "_C::rms_norm", "sgl_kernel::rmsnorm", "flashinfer::rmsnorm")
def rms_norm(call: Invocation) -> Form:
    x, weight = call.tensor("input"), call.tensor("weight")
    flat = (-1, x.shape[-1])
    output = made(x.dtype, AXES, lambda: written(call, "result", "output", "out").reshape(flat))
    return norm(call, x.reshape(flat), weight, {"output": output})


@family("fused_add_rmsnorm", "_C::fused_add_rms_norm", "sgl_kernel::fused_add_rmsnorm", "flashinfer::fused_add_rmsnorm")
def fused_add_rms_norm(call: Invocation) -> Form:
    """The operator writes both tensors in place: the normed sum into its input, the sum into the residual."""
    x, residual = call.tensor("input"), call.tensor("residual")
    flat = (-1, x.shape[-1])
    outputs = {
        "output": made(x.dtype, AXES, lambda: x.reshape(flat)),
        "residual_out": made(residual.dtype, AXES, lambda: residual.reshape(flat)),
    }
    return norm(call, x.reshape(flat), call.tensor("weight"), outputs, residual.reshape(flat))


AXES = ("batch_size", "hidden_size")


def norm(
    call: Invocation,
    x: torch.Tensor,
    weight: torch.Tensor,
    outputs: dict[str, Slot],
    residual: torch.Tensor | None = None,
) -> Form:
    """`x`, `residual`: [batch_size, hidden_size], `weight`: [hidden_size]."""
    if weight.dim() != 1:
        raise Unrecognized("the weight is no vector")
    hidden, eps = x.shape[-1], float(call.number("epsilon", "eps", "variance_epsilon"))
    inputs: dict[str, Slot] = {"hidden_states": of(x, *AXES)}
    if residual is not None:
        inputs["residual"] = of(residual, *AXES)
    inputs["weight"] = of(weight, "hidden_size")
    kind = "rmsnorm" if residual is None else "fused_add_rmsnorm"
    word = abbreviate(x.dtype, torch.bfloat16) + ("" if eps == 1e-5 else f"_eps{eps:g}")
    return Form(
        name=f"{kind}{word}_h{hidden}",
        op_type="rmsnorm",
        axes={"batch_size": None, "hidden_size": hidden},
        inputs=inputs,
        outputs=outputs,
        reference=(REFERENCE if residual is None else FUSED).format(h=hidden, eps=eps),
        description=f"{'Add, then root' if residual is not None else 'Root'} mean square norm, epsilon {eps:g}.",
        tags=("fused",) if residual is not None else (),
        flops=(4 if residual is None else 5) * x.numel(),
    )

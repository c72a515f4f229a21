"""rmsnorm_quant and fused_add_rmsnorm_quant: an rmsnorm whose result is quantized to float8 with a static scale."""

from __future__ import annotations

import torch

from kcap.schemas.families import family
from kcap.schemas.families.form import Form, abbreviate, made, of
from kcap.schemas.families.invocation import Invocation, Unrecognized
from kcap.schemas.families.rmsnorm import AXES, epsilon, rows

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert hidden_states.shape[-1] == {h}
    x = hidden_states.to(torch.float32){added}
    y = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + {eps!r}) * weight.to(torch.float32)
    output = (y / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return {outputs}
"""


@family("rmsnorm_quant", "_C::rms_norm_static_fp8_quant", "flashinfer::rmsnorm_quant")
def rmsnorm_quant(call: Invocation) -> Form:
    return norm_quant(call, None)


@family("rmsnorm_quant", "_C::fused_add_rms_norm_static_fp8_quant", "flashinfer::fused_add_rmsnorm_quant")
def fused_add_rmsnorm_quant(call: Invocation) -> Form:
    """The sum is written to the residual."""
    return norm_quant(call, call.tensor("residual"))


def norm_quant(call: Invocation, residual: torch.Tensor | None) -> Form:
    """`input` and `residual`: [batch_size, hidden_size], leading dimensions joined; one scale for all."""
    x, q, scale = call.tensor("input"), call.tensor("result", "out"), call.tensor("scale")
    if q.dtype != torch.float8_e4m3fn or scale.numel() != 1:
        raise Unrecognized("not to float8_e4m3fn with one scale")
    inputs, outputs = {"hidden_states": rows(x)}, {"output": made(q.dtype, AXES, lambda: q.reshape(-1, q.shape[-1]))}
    if residual is not None:
        inputs["residual"] = rows(residual)
        outputs["residual_out"] = rows(residual, lambda: residual)
    inputs |= {"weight": of(call.tensor("weight"), "hidden_size"), "scale": of(scale.reshape(()))}
    eps, hidden = epsilon(call, x.dtype), x.shape[-1]
    word = abbreviate(x.dtype, torch.bfloat16) + ("" if eps == 1e-5 else f"_eps{eps:g}")
    return Form(
        name=f"{'fused_add_' if residual is not None else ''}rmsnorm_quant{word}_h{hidden}",
        op_type="rmsnorm",
        axes={"batch_size": None, "hidden_size": hidden},
        inputs=inputs,
        outputs=outputs,
        reference=REFERENCE.format(
            inputs=", ".join(inputs),
            h=hidden,
            eps=eps,
            added="" if residual is None else " + residual.to(torch.float32)",
            outputs="output" if residual is None else "output, x.to(residual.dtype)",
        ),
        description=f"Root mean square norm, epsilon {eps:g}, quantized with a static scale.",
        tags=("quantization:float8_e4m3fn", *(("fused",) if residual is not None else ())),
        flops=6 * x.numel(),
    )

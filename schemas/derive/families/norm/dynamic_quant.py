"""rmsnorm_dynamic_quant: a root mean square norm, then float8 with a scale for each token or each group of columns.

What vLLM's compile passes make of a norm and the quantization after it. With a residual it is added first, in place.
The normed number is rounded to the input's dtype before it is multiplied by the weight, and after.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.families import family
from kcap.schemas.derive.families.norm.rmsnorm import AXES, epsilon, rows
from kcap.schemas.derive.invocation import Invocation, Unrecognized
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, tensor_arg

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert hidden_states.shape[-1] == {h}
    x = hidden_states.to(torch.float32){added}
    y = (x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + {eps!r})).to(hidden_states.dtype) * weight
    y = y.to(torch.float32).unflatten(-1, (-1, {group}))
    scale = (y.abs().amax(dim=-1) / 448.0).clamp(min={least!r})
    output = (y / scale[..., None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).flatten(-2)
    return {outputs}
"""
LEAST_SCALE = 1 / (448.0 * 512.0)  # vLLM's `min_scaling_factor`


@family("rmsnorm_dynamic_quant", "_C::rms_norm_dynamic_per_token_quant")
def per_token(call: Invocation) -> KernelInstance:
    return instance(call, call.tensor("input").shape[-1])


@family("rmsnorm_dynamic_quant", "_C::rms_norm_per_block_quant")
def per_block(call: Invocation) -> KernelInstance:
    """Scales may lie column by column (`is_scale_transposed`)."""
    return instance(call, int(call.number("group_size")))


def instance(call: Invocation, group: int) -> KernelInstance:
    """`input`, `residual`: [batch_size, hidden_size], leading dimensions joined; `scale`: [batch_size, groups]."""
    call.refuse("scale_ub")
    x, q, scale, residual = (*(call.tensor(n) for n in ("input", "result", "scale")), call.optional("residual"))
    h = x.shape[-1]
    if q.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32 or h % group:
        raise Unrecognized("not to float8_e4m3fn with a scale in float32 for whole groups")
    if scale.shape[-1] != h // group or scale.numel() * group != x.numel():
        raise Unrecognized("scales of another shape")
    inputs = {"hidden_states": rows(x), "weight": tensor_arg(call.tensor("weight"), "hidden_size")}
    outputs = {
        "output": lazy_arg(q.dtype, AXES, lambda: q.reshape(-1, h)),
        "scale": lazy_arg(scale.dtype, ("batch_size", "num_groups"), lambda: scale.reshape(-1, h // group)),
    }
    if residual is not None:
        inputs["residual"] = rows(residual)
        outputs["residual_out"] = rows(residual, lambda: residual)
    eps = epsilon(call, x.dtype)
    word = abbreviate(x.dtype, torch.bfloat16) + ("" if eps == 1e-5 else f"_eps{eps:g}")
    return KernelInstance(
        name=f"{'fused_add_' if residual is not None else ''}rmsnorm_dynamic_quant{word}_h{h}"
        + (f"_g{group}" if group < h else ""),
        op_type="rmsnorm",
        axes={"batch_size": None, "hidden_size": h, "num_groups": h // group},
        inputs=inputs,
        outputs=outputs,
        reference=REFERENCE.format(
            inputs=", ".join(inputs),
            h=h,
            eps=eps,
            group=group,
            least=LEAST_SCALE,
            added="" if residual is None else " + residual.to(torch.float32)",
            outputs="output, scale" + ("" if residual is None else ", x.to(residual.dtype)"),
        ),
        description=f"Root mean square norm, epsilon {eps:g}, quantized with a scale for each {group} columns.",
        tags=("quantization:float8_e4m3fn", "fused"),
        flops=7 * x.numel(),
    )

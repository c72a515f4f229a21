"""layernorm: PyTorch's layer norm (arXiv:1607.06450), and norms that are gated or go by groups of columns.

Mamba-2's and Qwen3-Next's output passes such a norm, a layer norm or a root mean square norm, which a second branch
gates before or after it: `_layer_norm_fwd_1pass_kernel` and `layer_norm_fwd_kernel` of vLLM, in Triton;
`layer_norm_gated_fwd_kernel` of Flash Linear Attention, as SGLang and vLLM have it, gates after it.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.families import family
from kcap.schemas.derive.families.norm.rmsnorm import AXES, epsilon, norm_instance, rows
from kcap.schemas.derive.invocation import Invocation, Unrecognized
from kcap.schemas.derive.kernel import KernelInstance, LazyValue, abbreviate, dtype_name, lazy_arg, tensor_arg

REFERENCE = """import torch
import torch.nn.functional as F


@torch.no_grad()
def run({inputs}):
    assert hidden_states.shape[-1] == {h}
    x = hidden_states.to(torch.float32){before}
    groups = x.unflatten(-1, (-1, {size})){centered}
    y = (groups * torch.rsqrt(groups.pow(2).mean(dim=-1, keepdim=True) + {eps!r})).flatten(-2){scale}{shift}
{after}    return y.to(torch.{dtype})
"""
CENTERED = "\n    groups = groups - groups.mean(dim=-1, keepdim=True)"
GATES = {
    "silu": "F.silu(gate.to(torch.float32))",
    "swish": "F.silu(gate.to(torch.float32))",
    "sigmoid": "torch.sigmoid(gate.to(torch.float32))",
}


@family("layernorm", "aten::layer_norm", "aten::native_layer_norm")
def layer_norm(call: Invocation) -> KernelInstance:
    """`native_layer_norm` returns means and reciprocals of deviations, too, which only a backward pass reads."""
    if len(call["normalized_shape"]) != 1:
        raise Unrecognized("more than the last dimension is normed")
    x = call.tensor("input")

    def output() -> torch.Tensor:
        normed: torch.Tensor = call.result[0] if isinstance(call.result, tuple) else call.result
        return normed

    parts = {name: call.optional(name) for name in ("weight", "bias")}
    return instance(x, parts, output, x.dtype, epsilon(call, x.dtype), x.shape[-1], centered=True)


@family("layernorm", "triton::_layer_norm_fwd_1pass_kernel", "triton::layer_norm_fwd_kernel")
def gated_norm(call: Invocation) -> KernelInstance:
    """`X`, `Y`, `Z`: [rows, columns], `W`, `B`: [columns]; `N`: columns of a group."""
    x, out, gate, shift = call.tensor("X"), call.tensor("Y"), call.optional("Z"), call.optional("B")
    before, rms, activation = call["NORM_BEFORE_GATE"], call["IS_RMS_NORM"], call["ACTIVATION"] or "silu"
    if not isinstance(rms, bool) or not isinstance(before, bool) or activation not in GATES:
        raise Unrecognized("its constants are not known")
    eps, size = float(call.number("eps")), int(call.number("N"))
    if rms and gate is None and shift is None and size == x.shape[-1]:
        plain = Invocation(call.operator, {"weight": call.tensor("W"), "eps": eps})
        return norm_instance(plain, x, lambda: out)
    parts = {"weight": call.tensor("W"), "bias": shift, "gate": gate}
    return instance(x, parts, lambda: out, out.dtype, eps, size, not rms, before, activation)


@family("layernorm", "triton::layer_norm_gated_fwd_kernel", "triton::layer_norm_gated_fwd_kernel1")
def norm_then_gate(call: Invocation) -> KernelInstance:
    """`x`, `y`: [rows, columns], `w`, `b`: [columns]; `mean` and `rstd` are for a backward pass.

    `g`: likewise, or [tokens, heads, columns] with strides.
    """
    call.refuse("residual", "residual_out")
    x, out, rms, activation = call.tensor("x"), call.tensor("y"), call["IS_RMS_NORM"], call["ACTIVATION"]
    if not isinstance(rms, bool) or activation not in GATES:
        raise Unrecognized("its constants are not known")
    parts = {"weight": call.optional("w"), "bias": call.optional("b"), "gate": call.tensor("g")}
    eps = float(call.number("eps"))
    return instance(x, parts, lambda: out, out.dtype, eps, x.shape[-1], not rms, activation=activation)


def instance(
    x: torch.Tensor,
    optional: dict[str, torch.Tensor | None],
    output: LazyValue,
    dtype: torch.dtype,
    eps: float,
    size: int,
    centered: bool,
    before: bool = True,
    activation: str = "silu",
) -> KernelInstance:
    """`x`: [..., columns], normed by groups of `size` columns. `optional`: of `weight`, `bias` and `gate`.

    `before`: it is normed before it is gated. `centered`: a layer norm, else a root mean square norm.
    """
    parts = {name: tensor for name, tensor in optional.items() if tensor is not None}
    h, inputs = x.shape[-1], {"hidden_states": rows(x)}
    if h % size:
        raise Unrecognized("its groups differ in size")
    inputs |= {name: rows(part) if name == "gate" else tensor_arg(part, "hidden_size") for name, part in parts.items()}
    gated = GATES[activation] if "gate" in parts else ""
    kind, words = "layernorm" if centered else "rmsnorm", abbreviate(dtype, torch.bfloat16)
    if gated:
        kind = ("gated_" if before else "pregated_") + kind
        words += "" if activation != "sigmoid" else "_sigmoid"
    words += "".join(f"_no{name}" for name in ("weight", "bias")[: 1 + centered] if name not in parts)
    words += "_bias" if "bias" in parts and not centered else ""
    words += ("" if eps == 1e-5 else f"_eps{eps:g}") + (f"_g{size}" if size < h else "")
    return KernelInstance(
        name=f"{kind}{words}_h{h}",
        op_type="layernorm" if centered else "rmsnorm",
        axes={"batch_size": None, "hidden_size": h},
        inputs=inputs,
        outputs={"output": lazy_arg(dtype, AXES, lambda: output().reshape(-1, h))},
        reference=REFERENCE.format(
            inputs=", ".join(inputs),
            h=h,
            size=size,
            eps=eps,
            dtype=dtype_name(dtype),
            centered=CENTERED if centered else "",
            scale=" * weight.to(torch.float32)" if "weight" in parts else "",
            shift=" + bias.to(torch.float32)" if "bias" in parts else "",
            before=f" * {gated}" if gated and not before else "",
            after=f"    y = y * {gated}\n" if gated and before else "",
        ),
        description=f"{'Layer' if centered else 'Root mean square'} norm, epsilon {eps:g}{', gated' if gated else ''}.",
        tags=("fused",) if gated else (),
        flops=(5 + 4 * bool(gated)) * x.numel(),
    )

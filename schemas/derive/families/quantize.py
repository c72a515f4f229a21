"""quantize: rows to float8 or int8 with a scale for all, for each row, or for each group of columns.

A dynamic scale maps the largest magnitude to the dtype's largest number; a static one is an input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function, family, valid_input
from kcap.schemas.derive.invocation import Invocation, Unrecognized
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, dtype_name, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert input.shape[-1] == {h}
    x = input.to(torch.float32){groups}
{scale}    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    q = (x * inverse{spread}){rounded}.clamp({low}, {high}).to(torch.{dtype}){joined}
    return {outputs}
"""

AMAX = "    scale = (x.abs().amax({dims}) / {high}){least}\n"


@dataclass(frozen=True)
class QuantizationKind:
    """`per`: what has a scale (tensor, token or group). `group`: its columns. `least`: the smallest dynamic scale."""

    per: str
    dynamic: bool
    group: int = 0
    least: float = 0.0


@family("quantize", "_C::static_scaled_fp8_quant", "_C::static_scaled_int8_quant")
def static(call: Invocation) -> KernelInstance:
    call.refuse("azp", "group_shape")
    return quantize_instance(
        call,
        call.tensor("input"),
        call.tensor("result", "out"),
        call.tensor("scale"),
        QuantizationKind("tensor", False),
    )


@family("quantize", "_C::dynamic_scaled_fp8_quant")
def per_tensor(call: Invocation) -> KernelInstance:
    return quantize_instance(
        call, call.tensor("input"), call.tensor("result", "out"), call.tensor("scale"), QuantizationKind("tensor", True)
    )


@family("quantize", "_C::dynamic_per_token_scaled_fp8_quant")
def per_token(call: Invocation) -> KernelInstance:
    """vLLM bounds a scale below by 1 / (448 * 512)."""
    call.refuse("scale_ub")
    q, scale = call.tensor("result", "out"), call.tensor("scale", "scales")
    return quantize_instance(
        call, call.tensor("input"), q, scale, QuantizationKind("token", True, least=1 / (448.0 * 512.0))
    )


@family("quantize", "_C::dynamic_scaled_int8_quant")
def per_token_int8(call: Invocation) -> KernelInstance:
    call.refuse("azp")
    return quantize_instance(
        call, call.tensor("input"), call.tensor("result", "out"), call.tensor("scale"), QuantizationKind("token", True)
    )


@family("quantize", "sgl_kernel::sgl_per_token_quant_fp8", "sgl_kernel::sgl_per_tensor_quant_fp8")
def sglang_quant(call: Invocation) -> KernelInstance:
    per = "tensor" if "per_tensor" in call.base else "token"
    kind = QuantizationKind(per, per == "token" or not call["is_static"])
    return quantize_instance(call, call.tensor("input"), call.tensor("output_q"), call.tensor("output_s"), kind)


@family("quantize", "_C::per_token_group_fp8_quant", "sgl_kernel::sgl_per_token_group_quant_8bit")
def per_group(call: Invocation) -> KernelInstance:
    """A group's largest magnitude counts as `eps` at least. Scales may lie column by column."""
    call.refuse("scale_ue8m0", "fuse_silu_and_mul", "masked_m")
    q, group = call.tensor("output_q"), int(call.number("group_size"))
    kind = QuantizationKind("group", True, group, float(call.number("eps")) / dtype_limits(q.dtype)[1])
    return quantize_instance(call, call.tensor("input"), q, call.tensor("output_s"), kind)


def dtype_limits(dtype: torch.dtype) -> tuple[float, float]:
    """The bounds that quantized numbers are clamped to; a dynamic scale maps the largest magnitude to the upper one."""
    if dtype == torch.int8:
        return -128.0, 127.0
    if dtype == torch.float8_e4m3fn:
        return -448.0, 448.0
    raise Unrecognized(f"no quantization to {dtype}")


def quantize_instance(
    call: Invocation, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, kind: QuantizationKind
) -> KernelInstance:
    """`x` and `q`: [..., hidden_size], leading dimensions joined; `scale`: [], [num_tokens] or [num_tokens, groups]."""
    h = x.shape[-1]
    shape, axes = _scales(kind, x.numel() // h, h)
    grouped = not kind.group or scale.shape[-1] == shape[-1]
    if scale.dtype != torch.float32 or scale.numel() != math.prod(shape) or not grouped:
        raise Unrecognized("scales of another shape, or packed")
    inputs = {"input": tensor_arg(x.reshape(-1, h), "num_tokens", "hidden_size")}
    outputs: dict[str, TensorArg] = {
        "output": lazy_arg(q.dtype, ("num_tokens", "hidden_size"), lambda: q.reshape(-1, h))
    }
    if kind.dynamic:
        outputs["scale"] = lazy_arg(scale.dtype, axes, lambda: scale.reshape(shape))
    else:
        inputs["scale"] = tensor_arg(scale.reshape(shape), *axes)
    word = f"{'' if kind.dynamic else '_static'}{abbreviate(q.dtype, torch.float8_e4m3fn)}"
    group = f"_g{kind.group}" if kind.group else ""
    return KernelInstance(
        name=f"quantize_per_{kind.per}{word}{abbreviate(x.dtype, torch.bfloat16)}_h{h}{group}",
        op_type="quantization",
        axes={"num_tokens": None, "hidden_size": h, **({"num_groups": h // kind.group} if kind.group else {})},
        inputs=inputs,
        outputs=outputs,
        reference=_reference(kind, h, q.dtype),
        description=f"Quantization with a {'dynamic' if kind.dynamic else 'static'} scale per {kind.per}.",
        tags=(f"quantization:{dtype_name(q.dtype)}",),
        flops=4 * x.numel(),
    )


def _scales(kind: QuantizationKind, rows: int, h: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The shape of the scales of `rows` by `h`, and its axes."""
    shape = (rows, h // kind.group) if kind.group else (rows,) if kind.per == "token" else ()
    return shape, ("num_tokens", "num_groups")[: len(shape)]


def _reference(kind: QuantizationKind, h: int, dtype: torch.dtype) -> str:
    low, high = dtype_limits(dtype)
    least = f".clamp(min={kind.least!r})" if kind.least else ""
    return REFERENCE.format(
        inputs="input" if kind.dynamic else "input, scale",
        h=h,
        groups=f".unflatten(-1, (-1, {kind.group}))" if kind.group else "",
        scale=AMAX.format(dims="" if kind.per == "tensor" else "dim=-1", high=high, least=least)
        if kind.dynamic
        else "",
        spread="" if kind.per == "tensor" else "[..., None]",
        rounded=".round()" if dtype == torch.int8 else "",
        low=low,
        high=high,
        dtype=dtype_name(dtype),
        joined=".flatten(-2)" if kind.group else "",
        outputs="q, scale" if kind.dynamic else "q",
    )


@valid_input("*_scale", "*_scales", "*_scale_inv", "*_scales_scalar", "*_scales_gate_scalar", "scale_a", "scale_b")
def valid_scales(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    if not draft.definition.inputs[name].dtype.startswith("float"):
        return None
    return draft.reals(0.5, 1.5, draft.shape(name))


cost_function("quantization")(CostInputs.whole)  # FLOPs are few, and not counted

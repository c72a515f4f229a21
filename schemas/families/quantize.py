"""quantize: rows to float8 or int8 with a scale for all, for each row, or for each group of columns.

A dynamic scale is what takes the largest magnitude to the dtype's largest number; a static one is an input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kcap.schemas.families import family
from kcap.schemas.families.form import Form, Slot, abbreviate, dtype_name, made, of
from kcap.schemas.families.invocation import Invocation, Unrecognized

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
class Kind:
    """`per`: what has a scale (tensor, token or group). `group`: its columns. `least`: the smallest dynamic scale."""

    per: str
    dynamic: bool
    group: int = 0
    least: float = 0.0


@family("quantize", "_C::static_scaled_fp8_quant", "_C::static_scaled_int8_quant")
def static(call: Invocation) -> Form:
    call.refuse("azp", "group_shape")
    return quantize(
        call, call.tensor("input"), call.tensor("result", "out"), call.tensor("scale"), Kind("tensor", False)
    )


@family("quantize", "_C::dynamic_scaled_fp8_quant")
def per_tensor(call: Invocation) -> Form:
    return quantize(
        call, call.tensor("input"), call.tensor("result", "out"), call.tensor("scale"), Kind("tensor", True)
    )


@family("quantize", "_C::dynamic_per_token_scaled_fp8_quant")
def per_token(call: Invocation) -> Form:
    """vLLM bounds a scale below by 1 / (448 * 512)."""
    call.refuse("scale_ub")
    q, scale = call.tensor("result", "out"), call.tensor("scale", "scales")
    return quantize(call, call.tensor("input"), q, scale, Kind("token", True, least=1 / (448.0 * 512.0)))


@family("quantize", "_C::dynamic_scaled_int8_quant")
def per_token_int8(call: Invocation) -> Form:
    call.refuse("azp")
    return quantize(call, call.tensor("input"), call.tensor("result", "out"), call.tensor("scale"), Kind("token", True))


@family("quantize", "sgl_kernel::sgl_per_token_quant_fp8", "sgl_kernel::sgl_per_tensor_quant_fp8")
def of_sglang(call: Invocation) -> Form:
    per = "tensor" if "per_tensor" in call.base else "token"
    kind = Kind(per, per == "token" or not call["is_static"])
    return quantize(call, call.tensor("input"), call.tensor("output_q"), call.tensor("output_s"), kind)


@family("quantize", "_C::per_token_group_fp8_quant", "sgl_kernel::sgl_per_token_group_quant_8bit")
def per_group(call: Invocation) -> Form:
    """A group's largest magnitude counts as `eps` at least. Scales may lie column by column."""
    call.refuse("scale_ue8m0", "fuse_silu_and_mul", "masked_m")
    q, group = call.tensor("output_q"), int(call.number("group_size"))
    kind = Kind("group", True, group, float(call.number("eps")) / limits(q.dtype)[1])
    return quantize(call, call.tensor("input"), q, call.tensor("output_s"), kind)


def limits(dtype: torch.dtype) -> tuple[float, float]:
    """The numbers that quantized ones are clamped to, and the largest that a dynamic scale takes a magnitude to."""
    if dtype == torch.int8:
        return -128.0, 127.0
    if dtype == torch.float8_e4m3fn:
        return -448.0, 448.0
    raise Unrecognized(f"no quantization to {dtype}")


def quantize(call: Invocation, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, kind: Kind) -> Form:
    """`x` and `q`: [..., hidden_size], leading dimensions joined; `scale`: [], [num_tokens] or [num_tokens, groups]."""
    h = x.shape[-1]
    shape, axes = _scales(kind, x.numel() // h, h)
    grouped = not kind.group or scale.shape[-1] == shape[-1]
    if scale.dtype != torch.float32 or scale.numel() != math.prod(shape) or not grouped:
        raise Unrecognized("scales of another shape, or packed")
    inputs = {"input": of(x.reshape(-1, h), "num_tokens", "hidden_size")}
    outputs: dict[str, Slot] = {"output": made(q.dtype, ("num_tokens", "hidden_size"), lambda: q.reshape(-1, h))}
    if kind.dynamic:
        outputs["scale"] = made(scale.dtype, axes, lambda: scale.reshape(shape))
    else:
        inputs["scale"] = of(scale.reshape(shape), *axes)
    word = f"{'' if kind.dynamic else '_static'}{abbreviate(q.dtype, torch.float8_e4m3fn)}"
    group = f"_g{kind.group}" if kind.group else ""
    return Form(
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


def _scales(kind: Kind, rows: int, h: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The shape of the scales of `rows` by `h`, and its axes."""
    shape = (rows, h // kind.group) if kind.group else (rows,) if kind.per == "token" else ()
    return shape, ("num_tokens", "num_groups")[: len(shape)]


def _reference(kind: Kind, h: int, dtype: torch.dtype) -> str:
    low, high = limits(dtype)
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

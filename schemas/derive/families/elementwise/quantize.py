"""quantize: rows to float8 or int8 with a scale for all, for each row, or for each group of columns.

A dynamic scale maps the largest magnitude to the dtype's largest number; a static one is an input. For DeepGEMM vLLM
rounds the scales of groups up to powers of two (UE8M0: an exponent of eight bits and no mantissa): in float32 on
Hopper, on Blackwell four exponents to an int32. SiLU and its gate may come before (`silu_and_mul_quantize`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.index_arguments import set_zeros
from kcap.schemas.derive.invocation import Invocation, Unrecognized
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, dtype_name, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert input.shape[-1] == {h}
    {x}{groups}
{scale}    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    q = (x * inverse{spread}){rounded}.clamp({low}, {high}).to(torch.{dtype}){joined}
    return {outputs}
"""

X = {  # what is quantized, by QuantizationKind.silu_and_mul
    "": "x = input.to(torch.float32)",
    "float32": """gate, up = input.to(torch.float32).chunk(2, dim=-1)
    x = torch.nn.functional.silu(gate) * up""",
    "rounded_product": """gate, up = input.to(torch.float32).chunk(2, dim=-1)
    x = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16).to(torch.float32)""",
    "rounded_factors": """gate, up = input.chunk(2, dim=-1)
    x = (torch.nn.functional.silu(gate.to(torch.float32)).to(input.dtype) * up).to(torch.float32)""",
}
AMAX = "    scale = (x.abs().amax({dims}) / {high}){least}\n"
POWER_OF_TWO = "    scale = torch.exp2(torch.ceil(torch.log2(scale)))\n"
PACKED = """
    scale = (scale.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)"""
LEAST_FLOAT8_SCALE = 1 / (448.0 * 512.0)  # vLLM's `min_scaling_factor`
LEAST_UE8M0_SCALE = 1e-10  # before it is rounded up to a power of two


@dataclass(frozen=True)
class QuantizationKind:
    """`per`: what has a scale (tensor, token or group). `group`: its columns. `least`: the smallest dynamic scale.

    `power_of_two`: scales are rounded up to one. `packed`: of four groups of a row the exponents are one int32.
    `silu_and_mul`: what is quantized is the first half of each row, through SiLU, times the second; the word says where
    the kernel rounds on the way.
    """

    per: str
    dynamic: bool
    group: int = 0
    least: float = 0.0
    power_of_two: bool = False
    packed: bool = False
    silu_and_mul: str = ""


@family("quantize", "_C::static_scaled_fp8_quant", "_C::static_scaled_int8_quant")
def static(call: Invocation) -> KernelInstance:
    """`group_shape`, which says what several scales are for, is passed with one for all, too."""
    call.refuse("azp")
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
    call.refuse("scale_ub")
    q, scale = call.tensor("result", "out"), call.tensor("scale", "scales")
    return quantize_instance(
        call, call.tensor("input"), q, scale, QuantizationKind("token", True, least=LEAST_FLOAT8_SCALE)
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


SGLANG_EPS = 1e-10  # in its kernels/jit/csrc/gemm/per_token_group_quant.cuh


@family(
    *("quantize", "_C::per_token_group_fp8_quant"),
    *("sgl_kernel::sgl_per_token_group_quant_8bit", "sglang::per_token_group_quant"),
    "sglang::per_token_group_quant_8bit_v2",
)
def per_group(call: Invocation) -> KernelInstance:
    """A group's largest magnitude counts as `eps` at least. Scales may lie column by column, rows padded to four."""
    call.refuse("fuse_silu_and_mul", "masked_m", "sorted_token_ids")
    q, group, rounded = call.tensor("output_q"), int(call.number("group_size")), bool(call["scale_ue8m0"])
    if rounded and not call.base.startswith("_C::"):
        raise Unrecognized("scales packed as SGLang's kernel does")
    eps = SGLANG_EPS if call.base == "sglang::per_token_group_quant" else float(call.number("eps"))
    least = eps / dtype_limits(q.dtype)[1]
    kind = QuantizationKind("group", True, group, max(least, LEAST_UE8M0_SCALE * rounded), rounded)
    return quantize_instance(call, call.tensor("input"), q, call.tensor("output_s"), kind)


@family("quantize", "_C::per_token_group_fp8_quant_packed")
def per_group_packed(call: Invocation) -> KernelInstance:
    """`output_s_packed`: [num_tokens, groups / 4], int32, column by column."""
    q, group = call.tensor("output_q"), int(call.number("group_size"))
    least = max(float(call.number("eps")) / dtype_limits(q.dtype)[1], LEAST_UE8M0_SCALE)
    kind = QuantizationKind("group", True, group, least, power_of_two=True, packed=True)
    return quantize_instance(call, call.tensor("input"), q, call.tensor("output_s_packed"), kind)


@family("quantize", "triton::_per_token_group_quant_fp8", "triton::_per_token_group_quant_fp8_colmajor")
def per_group_of_triton(call: Invocation) -> KernelInstance:
    """vLLM's, for rows that are not contiguous; its rounded scales have no bound but that of `eps`."""
    return triton_group_instance(call, int(call.number("group_size")), "")


@family("quantize", "triton::_silu_mul_per_token_group_quant_fp8_colmajor")
def silu_and_mul_per_group_of_triton(call: Invocation) -> KernelInstance:
    """vLLM's, between the two matrices of DeepGEMM's experts."""
    refuse_other_gates(call)
    return triton_group_instance(call, int(call.number("GROUP_SIZE")), "rounded_factors")


def triton_group_instance(call: Invocation, group: int, silu_and_mul: str) -> KernelInstance:
    x, q, scale = (call.tensor(name) for name in ("y_ptr", "y_q_ptr", "y_s_ptr"))
    if not isinstance(call["use_ue8m0"], bool):
        raise Unrecognized("its constants are not known")
    least = float(call.number("eps")) / dtype_limits(q.dtype)[1]
    kind = QuantizationKind("group", True, group, least, call["use_ue8m0"], silu_and_mul=silu_and_mul)
    return quantize_instance(call, x, q, scale, kind)


@family("quantize", "triton::_silu_mul_quant_fp8_packed_kernel")
def silu_and_mul_packed(call: Invocation) -> KernelInstance:
    refuse_other_gates(call)
    x, q, scale = (call.tensor(name) for name in ("input_ptr", "output_q_ptr", "output_scale_ptr"))
    group = int(call.number("GROUP_SIZE"))
    return quantize_instance(
        call, x, q, scale, QuantizationKind("group", True, group, 1e-10, True, True, "rounded_product")
    )


@family("quantize", "trtllm::fp8_quantize_1x128")
def per_group_of_trtllm(call: Invocation) -> KernelInstance:
    """It returns the quantized rows and their scales, in a layout that depends on the GPU."""
    call.refuse("use_ue8m0")
    x = call.tensor("input")
    rows, h = x.shape
    q = x.new_empty((rows, h), dtype=torch.float8_e4m3fn, device="meta")
    scale = x.new_empty((rows, -(-h // TRTLLM_GROUP)), dtype=torch.float32, device="meta")
    kernel = quantize_instance(call, x, q, scale, QuantizationKind("group", True, TRTLLM_GROUP))
    values = {"output": lambda: call.result[0], "scale": lambda: trtllm_group_scales(call.result[1], rows, h)}
    outputs = {name: replace(output, value=values[name]) for name, output in kernel.outputs.items()}
    return replace(kernel, outputs=outputs)


TRTLLM_GROUP, TRTLLM_ROWS = 128, 4  # columns to a scale; what the rows of a column of scales are padded to


def trtllm_group_scales(scale: torch.Tensor, rows: int, h: int) -> torch.Tensor:
    """Scales [rows, groups] from TensorRT-LLM's, which lie group by group (fp8Quantize.cpp of 1.2).

    On Hopper and before in one dimension, rows padded, with room behind them; on Blackwell [groups, rows].
    """
    groups, padded = -(-h // TRTLLM_GROUP), -(-rows // TRTLLM_ROWS) * TRTLLM_ROWS
    if scale.dtype != torch.float32:
        raise Unrecognized("its scales are packed")
    if scale.dim() == 1 and scale.numel() >= groups * padded:
        return scale[: groups * padded].view(groups, padded)[:, :rows].T
    if scale.shape == (groups, rows):
        return scale.T
    raise Unrecognized("its scales lie in an order that is not known")


def refuse_other_gates(call: Invocation) -> None:
    """vLLM 0.32's kernels also have gpt-oss' gate, and leave out rows that no expert has."""
    call.refuse("HAS_CLAMP", "EXPERT_ALIGNMENT", "beta")
    if call["alpha"] not in (None, 1, 1.0):
        raise Unrecognized("its gate is not SiLU")


@family("quantize", "_C::silu_and_mul_per_block_quant")
def silu_and_mul_per_block(call: Invocation) -> KernelInstance:
    """As vLLM's compile pass fuses the two, and its Triton experts call them."""
    call.refuse("scale_ub", "use_ue8m0", "swiglu_limit")
    q, scale = call.tensor("out"), call.tensor("scales")
    if q.dtype != torch.float8_e4m3fn:
        raise Unrecognized(f"not to float8_e4m3fn but to {q.dtype}")
    kind = QuantizationKind("group", True, int(call.number("group_size")), LEAST_FLOAT8_SCALE, silu_and_mul="float32")
    return quantize_instance(call, call.tensor("input"), q, scale, kind)


@family("quantize", "_C::silu_and_mul_quant")
def silu_and_mul_static(call: Invocation) -> KernelInstance:
    kind = QuantizationKind("tensor", False, silu_and_mul="float32")
    return quantize_instance(call, call.tensor("input"), call.tensor("result", "out"), call.tensor("scale"), kind)


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
    """`x` and `q`: [..., hidden_size], leading dimensions joined; `scale`: [], [num_tokens] or [num_tokens, groups].

    For SiLU and its gate `x` is twice as wide.
    """
    h, width = q.shape[-1], x.shape[-1]
    shape, axes = _scales(kind, q.numel() // h, h)
    grouped = not kind.group or scale.shape[-1] == shape[-1]
    if scale.dtype != (torch.int32 if kind.packed else torch.float32) or scale.numel() != math.prod(shape):
        raise Unrecognized("scales of another shape, or packed")
    if not grouped or width != h * (2 if kind.silu_and_mul else 1) or (kind.group and h % kind.group):
        raise Unrecognized("columns that are not of its groups")
    columns = "gate_up_size" if kind.silu_and_mul else "hidden_size"
    inputs = {"input": tensor_arg(x.reshape(-1, width), "num_tokens", columns)}
    outputs: dict[str, TensorArg] = {
        "output": lazy_arg(q.dtype, ("num_tokens", "hidden_size"), lambda: q.reshape(-1, h))
    }
    if kind.dynamic:
        outputs["scale"] = lazy_arg(scale.dtype, axes, lambda: scale.reshape(shape))
    else:
        inputs["scale"] = tensor_arg(scale.reshape(shape), *axes)
    word = f"{'' if kind.dynamic else '_static'}{'_ue8m0' if kind.power_of_two else ''}"
    word += f"{'_packed' if kind.packed else ''}{abbreviate(q.dtype, torch.float8_e4m3fn)}"
    group = f"_g{kind.group}" if kind.group else ""
    before = "silu_and_mul_" if kind.silu_and_mul else ""
    before += f"{kind.silu_and_mul}_" if "rounded" in kind.silu_and_mul else ""
    return KernelInstance(
        name=f"{before}quantize_per_{kind.per}{word}{abbreviate(x.dtype, torch.bfloat16)}_h{h}{group}",
        op_type="quantization",
        axes={"num_tokens": None, columns: width, "hidden_size": h, **({axes[1]: shape[1]} if kind.group else {})},
        inputs=inputs,
        outputs=outputs,
        reference=_reference(kind, width, h, q.dtype),
        description=f"{'silu_and_mul, then q' if kind.silu_and_mul else 'Q'}uantization with a "
        f"{'dynamic' if kind.dynamic else 'static'} scale per {kind.per}.",
        tags=(f"quantization:{dtype_name(q.dtype)}", *(("fused",) if kind.silu_and_mul else ())),
        constraints=("gate_up_size == 2 * hidden_size",) if kind.silu_and_mul else (),
        flops=4 * x.numel(),
    )


def _scales(kind: QuantizationKind, rows: int, h: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The shape of the scales of `rows` by `h`, and its axes."""
    if kind.packed:
        if h % (4 * kind.group):
            raise Unrecognized("what fills up the last word of a row's scales differs from kernel to kernel")
        return (rows, h // kind.group // 4), ("num_tokens", "num_packed")
    shape = (rows, h // kind.group) if kind.group else (rows,) if kind.per == "token" else ()
    return shape, ("num_tokens", "num_groups")[: len(shape)]


def _reference(kind: QuantizationKind, width: int, h: int, dtype: torch.dtype) -> str:
    low, high = dtype_limits(dtype)
    least = f".clamp(min={kind.least!r})" if kind.least else ""
    amax = AMAX.format(dims="" if kind.per == "tensor" else "dim=-1", high=high, least=least)
    return REFERENCE.format(
        inputs="input" if kind.dynamic else "input, scale",
        h=width,
        x=X[kind.silu_and_mul],
        groups=f"\n    x = x.unflatten(-1, (-1, {kind.group}))" if kind.group else "",
        scale=(amax if kind.dynamic else "") + (POWER_OF_TWO if kind.power_of_two else ""),
        spread="" if kind.per == "tensor" else "[..., None]",
        rounded=".round()" if dtype == torch.int8 else "",
        low=low,
        high=high,
        dtype=dtype_name(dtype),
        joined=(".flatten(-2)" if kind.group else "") + (PACKED if kind.packed else ""),
        outputs="q, scale" if kind.dynamic else "q",
    )


@replay_rule("_C::per_token_group_fp8_quant_packed", "triton::_silu_mul_quant_fp8_packed_kernel")
class PackedScales(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "output_s_packed", "output_scale_ptr")


@valid_input("scale", op_types=("quantization", "rmsnorm"))
@valid_input("*_scale", "*_scales", "*_scale_inv", "*_scales_scalar", "*_scales_gate_scalar", "scale_a", "scale_b")
def valid_scales(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    if not draft.definition.inputs[name].dtype.startswith("float"):
        return None
    return draft.reals(0.5, 1.5, draft.shape(name))


cost_function("quantization")(CostInputs.whole)  # FLOPs are few, and not counted

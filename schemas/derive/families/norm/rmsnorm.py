"""rmsnorm and fused_add_rmsnorm (Zhang and Sennrich, arXiv:1910.07467), also quantized to float8.

Names are FlashInfer-Bench's. Gemma's operators multiply by one more than the weight: `gemma_rmsnorm`. Inputs of more
dimensions (the heads of Qwen3's queries and keys) have their rows joined.

FlashInfer: `rmsnorm(out, input, weight, eps, …)`; SGLang: `rmsnorm(input, weight, out, eps)`. Both:
`fused_add_rmsnorm(input, residual, weight, eps, …)`.

TensorRT-LLM's operators around FlashInfer's were read in its flashinfer_custom_ops.py (1.2), SGLang's classes in
sglang/srt/layers of 0.5.15 and 0.5.23: their arguments are those of `forward_native`, then what the object holds.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function, family
from kcap.schemas.derive.invocation import Invocation, Unrecognized, written_or_returned
from kcap.schemas.derive.kernel import KernelInstance, LazyValue, TensorArg, abbreviate, lazy_arg, tensor_arg

REFERENCE = """import torch


@torch.no_grad()
def run(hidden_states, weight):
    assert hidden_states.shape[-1] == {h}
    x = hidden_states.to(torch.float32)
    y = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + {eps!r})
    return (y * {scale}).to(hidden_states.dtype)
"""

FUSED = """import torch


@torch.no_grad()
def run(hidden_states, residual, weight):
    assert hidden_states.shape[-1] == {h}
    x = hidden_states.to(torch.float32) + residual.to(torch.float32)
    y = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + {eps!r})
    return (y * {scale}).to(hidden_states.dtype), x.to(residual.dtype)
"""

SCALES = {"": "weight.to(torch.float32)", "gemma_": "(weight.to(torch.float32) + 1.0)"}
AXES = ("batch_size", "hidden_size")


@family(
    "rmsnorm",
    "_C::rms_norm",
    "sgl_kernel::rmsnorm",
    "sgl_kernel::rmsnorm_cpu",
    "flashinfer::rmsnorm",
    "trtllm::flashinfer_rmsnorm",
)
def rms_norm(call: Invocation) -> KernelInstance:
    return norm_instance(call, call.tensor("input"), lambda: written_or_returned(call, "result", "output", "out"))


@family(
    "rmsnorm",
    "sgl_kernel::gemma_rmsnorm",
    "sgl_kernel::gemma_rmsnorm_cpu",
    "flashinfer::gemma_rmsnorm",
    "trtllm::flashinfer_gemma_rmsnorm",
)
def gemma_rms_norm(call: Invocation) -> KernelInstance:
    return norm_instance(call, call.tensor("input"), lambda: written_or_returned(call, "output", "out"), kind="gemma_")


@family("rmsnorm", "aten::rms_norm", "aten::_fused_rms_norm")
def rms_norm_of_aten(call: Invocation) -> KernelInstance:
    """`_fused_rms_norm` returns the reciprocal of the root, too, which only a backward pass reads."""
    if len(call["normalized_shape"]) != 1:
        raise Unrecognized("more than the last dimension is normed")
    return norm_instance(
        call, call.tensor("input"), lambda: call.result[0] if isinstance(call.result, tuple) else call.result
    )


@family("rmsnorm", "vllm_ir::rms_norm")
def rms_norm_of_vllm(call: Invocation) -> KernelInstance:
    call.refuse("variance_size")
    return norm_instance(call, call.tensor("x"), lambda: call.result)


@family(
    "fused_add_rmsnorm",
    "_C::fused_add_rms_norm",
    "sgl_kernel::fused_add_rmsnorm",
    "sgl_kernel::fused_add_rmsnorm_cpu",
    "flashinfer::fused_add_rmsnorm",
    "trtllm::flashinfer_fused_add_rmsnorm",
)
def fused_add_rms_norm(call: Invocation) -> KernelInstance:
    return in_place_instance(call, "")


@family(
    "fused_add_rmsnorm",
    "sgl_kernel::gemma_fused_add_rmsnorm",
    "flashinfer::gemma_fused_add_rmsnorm",
    "trtllm::flashinfer_gemma_fused_add_rmsnorm",
)
def gemma_fused_add_rms_norm(call: Invocation) -> KernelInstance:
    return in_place_instance(call, "gemma_")


@family("fused_add_rmsnorm", "vllm_ir::fused_add_rms_norm")
def fused_add_rms_norm_of_vllm(call: Invocation) -> KernelInstance:
    call.refuse("variance_size")
    return returned_instance(call, call.tensor("x"), call.tensor("x_residual"), "")


@family("rmsnorm", "vllm_custom_op::gemma_rms_norm")
def gemma_rms_norm_of_vllm(call: Invocation) -> KernelInstance:
    """With a residual it is the fused operator, and returns both."""
    x, residual = call.tensor("x"), call.optional("residual")
    if residual is None:
        return norm_instance(call, x, lambda: call.result, kind="gemma_")
    return returned_instance(call, x, residual, "gemma_")


def in_place_instance(call: Invocation, kind: str) -> KernelInstance:
    """The operator writes both tensors: the normed sum into its input, the sum into the residual."""
    x, residual = call.tensor("input"), call.tensor("residual")
    return norm_instance(call, x, lambda: x, residual, lambda: residual, kind)


def returned_instance(call: Invocation, x: torch.Tensor, residual: torch.Tensor, kind: str) -> KernelInstance:
    return norm_instance(call, x, lambda: call.result[0], residual, lambda: call.result[1], kind)


def norm_instance(
    call: Invocation,
    x: torch.Tensor,
    output: LazyValue,
    residual: torch.Tensor | None = None,
    residual_out: LazyValue | None = None,
    kind: str = "",
) -> KernelInstance:
    """`x`, `residual` and the outputs: [batch_size, hidden_size], leading dimensions joined; the weight: [hidden_size].

    `kind` is a key of SCALES, and the name's beginning.
    """
    weight, eps, hidden = call.tensor("weight"), epsilon(call, x.dtype), x.shape[-1]
    inputs, outputs = {"hidden_states": rows(x)}, {"output": rows(x, output)}
    if residual is not None and residual_out is not None:
        inputs["residual"], outputs["residual_out"] = rows(residual), rows(residual, residual_out)
    inputs["weight"] = tensor_arg(weight, "hidden_size")
    word = abbreviate(x.dtype, torch.bfloat16) + ("" if eps == 1e-5 else f"_eps{eps:g}")
    reference = REFERENCE if residual is None else FUSED
    return KernelInstance(
        name=f"{kind}{'fused_add_' if residual is not None else ''}rmsnorm{word}_h{hidden}",
        op_type="rmsnorm",
        axes={"batch_size": None, "hidden_size": hidden},
        inputs=inputs,
        outputs=outputs,
        reference=reference.format(h=hidden, eps=eps, scale=SCALES[kind]),
        description=f"{'Add, then root' if residual is not None else 'Root'} mean square norm, epsilon {eps:g}.",
        tags=("fused",) if residual is not None else (),
        flops=(4 if residual is None else 5) * x.numel(),
    )


def rows(tensor: torch.Tensor, value: LazyValue | None = None) -> TensorArg:
    """`tensor` with its leading dimensions joined, or what will have its shape."""
    flat = (-1, tensor.shape[-1])
    return (
        tensor_arg(tensor.reshape(flat), *AXES)
        if value is None
        else lazy_arg(tensor.dtype, AXES, lambda: value().reshape(flat))
    )


def epsilon(call: Invocation, dtype: torch.dtype) -> float:
    """aten's may be null: the dtype's own."""
    if call.base.startswith("aten::") and call["eps"] is None:
        return float(torch.finfo(dtype).eps)
    return float(call.number("epsilon", "eps", "variance_epsilon"))


QUANT_REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert hidden_states.shape[-1] == {h}
    x = hidden_states.to(torch.float32){added}
    y = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + {eps!r}) * weight.to(torch.float32)
    output = (y / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return {outputs}
"""


@family("rmsnorm_quant", "_C::rms_norm_static_fp8_quant", "flashinfer::rmsnorm_quant")
def rmsnorm_quant(call: Invocation) -> KernelInstance:
    return norm_quant_instance(call, None)


@family(
    "rmsnorm_quant",
    "_C::fused_add_rms_norm_static_fp8_quant",
    "flashinfer::fused_add_rmsnorm_quant",
    "trtllm::flashinfer_fused_add_rmsnorm_quant",
)
def fused_add_rmsnorm_quant(call: Invocation) -> KernelInstance:
    """The sum is written to the residual."""
    return norm_quant_instance(call, call.tensor("residual"))


def norm_quant_instance(call: Invocation, residual: torch.Tensor | None) -> KernelInstance:
    """`input` and `residual`: [batch_size, hidden_size], leading dimensions joined; one scale for all."""
    x, q, scale = call.tensor("input"), call.tensor("result", "out"), call.tensor("scale")
    if q.dtype != torch.float8_e4m3fn or scale.numel() != 1:
        raise Unrecognized("not to float8_e4m3fn with one scale")
    inputs, outputs = (
        {"hidden_states": rows(x)},
        {"output": lazy_arg(q.dtype, AXES, lambda: q.reshape(-1, q.shape[-1]))},
    )
    if residual is not None:
        inputs["residual"] = rows(residual)
        outputs["residual_out"] = rows(residual, lambda: residual)
    inputs |= {"weight": tensor_arg(call.tensor("weight"), "hidden_size"), "scale": tensor_arg(scale.reshape(()))}
    eps, hidden = epsilon(call, x.dtype), x.shape[-1]
    word = abbreviate(x.dtype, torch.bfloat16) + ("" if eps == 1e-5 else f"_eps{eps:g}")
    return KernelInstance(
        name=f"{'fused_add_' if residual is not None else ''}rmsnorm_quant{word}_h{hidden}",
        op_type="rmsnorm",
        axes={"batch_size": None, "hidden_size": hidden},
        inputs=inputs,
        outputs=outputs,
        reference=QUANT_REFERENCE.format(
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


@family("rmsnorm", "tvm::rmsnorm")
def tvm_rms_norm(call: Invocation) -> KernelInstance:
    first, second, third = _tvm_tensors(call)
    x, weight, out = (first, second, third) if second.dim() == 1 else (second, third, first)
    return norm_instance(_tvm_named(call, input=x, weight=weight), x, lambda: out)


@family("rmsnorm", "tvm::gemma_rmsnorm")
def tvm_gemma_rms_norm(call: Invocation) -> KernelInstance:
    """FlashInfer's alone."""
    out, x, weight = _tvm_tensors(call)
    return norm_instance(_tvm_named(call, input=x, weight=weight), x, lambda: out, kind="gemma_")


@family("fused_add_rmsnorm", "tvm::fused_add_rmsnorm")
def tvm_fused_add_rms_norm(call: Invocation) -> KernelInstance:
    return _tvm_fused(call, "")


@family("fused_add_rmsnorm", "tvm::gemma_fused_add_rmsnorm")
def tvm_gemma_fused_add_rms_norm(call: Invocation) -> KernelInstance:
    return _tvm_fused(call, "gemma_")


def _tvm_fused(call: Invocation, kind: str) -> KernelInstance:
    x, residual, weight = _tvm_tensors(call)
    return in_place_instance(_tvm_named(call, input=x, residual=residual, weight=weight), kind)


def _tvm_tensors(call: Invocation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first, second, third = (call.tensor(f"arg{index}") for index in range(3))
    if [tensor.dim() for tensor in (first, second, third)].count(1) != 1:
        raise Unrecognized("it has not one weight")
    return first, second, third


def _tvm_named(call: Invocation, **tensors: torch.Tensor) -> Invocation:
    return Invocation(call.operator, {**tensors, "eps": call.number("arg3")}, result=call.result)


@family("rmsnorm", "sglang_op::RMSNorm")
def sglang_class_rms_norm(call: Invocation) -> KernelInstance:
    """With a residual it adds first, and returns both; a residual in float32 is another kernel."""
    call.refuse("post_residual_addition", "variance_size_override", "quant_linear")
    x, residual = call.tensor("x"), call.optional("residual")
    if call["override_orig_dtype"] not in (None, x.dtype):
        raise Unrecognized("what it returns is of another type than what it is given")
    if residual is not None and call["fp32_residual"] and x.dtype != torch.float32:
        raise Unrecognized("its residual stays in float32")
    if call["cast_x_before_out_mul"] and call.tensor("weight").dtype != x.dtype:
        raise Unrecognized("its weight decides the type of what it returns")
    return _sglang_class_norm(call, x, residual, "")


@family("rmsnorm", "sglang_op::GemmaRMSNorm", "sglang_op::Gemma3RMSNorm")
def sglang_class_gemma_rms_norm(call: Invocation) -> KernelInstance:
    call.refuse("post_residual_addition")
    return _sglang_class_norm(call, call.tensor("x"), call.optional("residual"), "gemma_")


def _sglang_class_norm(call: Invocation, x: torch.Tensor, residual: torch.Tensor | None, kind: str) -> KernelInstance:
    if residual is None:
        return norm_instance(call, x, lambda: call.result, kind=kind)
    return returned_instance(call, x, residual, kind)


cost_function("rmsnorm", "layernorm")(CostInputs.whole)  # FLOPs are few, and not counted

"""rmsnorm and fused_add_rmsnorm (Zhang and Sennrich, arXiv:1910.07467), with FlashInfer-Bench's names.

Gemma's operators multiply by one more than the weight: `gemma_rmsnorm`. Inputs of more dimensions (the heads of Qwen3's
queries and keys) have their rows joined.
"""

from __future__ import annotations

import torch

from kcap.schemas.families import family
from kcap.schemas.families.form import Form, Slot, Thunk, abbreviate, made, of
from kcap.schemas.families.invocation import Invocation, Unrecognized
from kcap.schemas.families.results import written

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


@family("rmsnorm", "_C::rms_norm", "sgl_kernel::rmsnorm", "sgl_kernel::rmsnorm_cpu", "flashinfer::rmsnorm")
def rms_norm(call: Invocation) -> Form:
    return norm(call, call.tensor("input"), lambda: written(call, "result", "output", "out"))


@family("rmsnorm", "sgl_kernel::gemma_rmsnorm", "sgl_kernel::gemma_rmsnorm_cpu", "flashinfer::gemma_rmsnorm")
def gemma_rms_norm(call: Invocation) -> Form:
    return norm(call, call.tensor("input"), lambda: written(call, "output", "out"), kind="gemma_")


@family("rmsnorm", "aten::rms_norm", "aten::_fused_rms_norm")
def rms_norm_of_aten(call: Invocation) -> Form:
    """`_fused_rms_norm` returns the reciprocal of the root, too, which only a backward pass reads."""
    if len(call["normalized_shape"]) != 1:
        raise Unrecognized("more than the last dimension is normed")
    return norm(call, call.tensor("input"), lambda: call.result[0] if isinstance(call.result, tuple) else call.result)


@family("rmsnorm", "vllm_ir::rms_norm")
def rms_norm_of_vllm(call: Invocation) -> Form:
    call.refuse("variance_size")
    return norm(call, call.tensor("x"), lambda: call.result)


@family(
    "fused_add_rmsnorm",
    "_C::fused_add_rms_norm",
    "sgl_kernel::fused_add_rmsnorm",
    "sgl_kernel::fused_add_rmsnorm_cpu",
    "flashinfer::fused_add_rmsnorm",
)
def fused_add_rms_norm(call: Invocation) -> Form:
    return in_place(call, "")


@family("fused_add_rmsnorm", "sgl_kernel::gemma_fused_add_rmsnorm", "flashinfer::gemma_fused_add_rmsnorm")
def gemma_fused_add_rms_norm(call: Invocation) -> Form:
    return in_place(call, "gemma_")


@family("fused_add_rmsnorm", "vllm_ir::fused_add_rms_norm")
def fused_add_rms_norm_of_vllm(call: Invocation) -> Form:
    call.refuse("variance_size")
    return returned(call, call.tensor("x"), call.tensor("x_residual"), "")


@family("rmsnorm", "vllm_custom_op::gemma_rms_norm")
def gemma_rms_norm_of_vllm(call: Invocation) -> Form:
    """With a residual it is the fused operator, and returns both."""
    x, residual = call.tensor("x"), call.optional("residual")
    if residual is None:
        return norm(call, x, lambda: call.result, kind="gemma_")
    return returned(call, x, residual, "gemma_")


def in_place(call: Invocation, kind: str) -> Form:
    """The operator writes both tensors: the normed sum into its input, the sum into the residual."""
    x, residual = call.tensor("input"), call.tensor("residual")
    return norm(call, x, lambda: x, residual, lambda: residual, kind)


def returned(call: Invocation, x: torch.Tensor, residual: torch.Tensor, kind: str) -> Form:
    return norm(call, x, lambda: call.result[0], residual, lambda: call.result[1], kind)


def norm(
    call: Invocation,
    x: torch.Tensor,
    output: Thunk,
    residual: torch.Tensor | None = None,
    residual_out: Thunk | None = None,
    kind: str = "",
) -> Form:
    """`x`, `residual` and the outputs: [batch_size, hidden_size], leading dimensions joined; the weight: [hidden_size].

    `kind` is a key of SCALES, and the name's beginning.
    """
    weight, eps, hidden = call.tensor("weight"), epsilon(call, x.dtype), x.shape[-1]
    inputs, outputs = {"hidden_states": rows(x)}, {"output": rows(x, output)}
    if residual is not None and residual_out is not None:
        inputs["residual"], outputs["residual_out"] = rows(residual), rows(residual, residual_out)
    inputs["weight"] = of(weight, "hidden_size")
    word = abbreviate(x.dtype, torch.bfloat16) + ("" if eps == 1e-5 else f"_eps{eps:g}")
    reference = REFERENCE if residual is None else FUSED
    return Form(
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


def rows(tensor: torch.Tensor, value: Thunk | None = None) -> Slot:
    """`tensor` with its leading dimensions joined, or what will have its shape."""
    flat = (-1, tensor.shape[-1])
    return of(tensor.reshape(flat), *AXES) if value is None else made(tensor.dtype, AXES, lambda: value().reshape(flat))


def epsilon(call: Invocation, dtype: torch.dtype) -> float:
    """aten's may be null: the dtype's own."""
    if call.base.startswith("aten::") and call["eps"] is None:
        return float(torch.finfo(dtype).eps)
    return float(call.number("epsilon", "eps", "variance_epsilon"))

"""SGLang's own operator classes where they run as PyTorch's: regions, which have their kernel's Definition.

Read in sglang/srt/layers of 0.5.15 and 0.5.23. Arguments are those of `forward_native`, then what the object holds.
"""

from __future__ import annotations

import torch

from kcap.schemas.families import family
from kcap.schemas.families.activation import gated
from kcap.schemas.families.form import Form
from kcap.schemas.families.invocation import Invocation, Unrecognized
from kcap.schemas.families.rmsnorm import norm, returned
from kcap.schemas.families.rope import Rope, rope

# Those that compute their table in another way, and rotate by it as the first does.
ROTARY = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "DynamicNTKAlphaRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
    "Gemma4RotaryEmbedding",
)


@family("rmsnorm", "sglang_op::RMSNorm")
def rms_norm(call: Invocation) -> Form:
    """With a residual it adds first, and returns both; a residual in float32 is another kernel."""
    call.refuse("post_residual_addition", "variance_size_override", "quant_linear")
    x, residual = call.tensor("x"), call.optional("residual")
    if call["override_orig_dtype"] not in (None, x.dtype):
        raise Unrecognized("what it returns is of another type than what it is given")
    if residual is not None and call["fp32_residual"] and x.dtype != torch.float32:
        raise Unrecognized("its residual stays in float32")
    if call["cast_x_before_out_mul"] and call.tensor("weight").dtype != x.dtype:
        raise Unrecognized("its weight decides the type of what it returns")
    return normed(call, x, residual, "")


@family("rmsnorm", "sglang_op::GemmaRMSNorm", "sglang_op::Gemma3RMSNorm")
def gemma_rms_norm(call: Invocation) -> Form:
    call.refuse("post_residual_addition")
    return normed(call, call.tensor("x"), call.optional("residual"), "gemma_")


def normed(call: Invocation, x: torch.Tensor, residual: torch.Tensor | None, kind: str) -> Form:
    if residual is None:
        return norm(call, x, lambda: call.result, kind=kind)
    return returned(call, x, residual, kind)


@family("activation", "sglang_op::SiluAndMul")
def silu_and_mul(call: Invocation) -> Form:
    return gated(call, "silu")


@family("activation", "sglang_op::GeluAndMul")
def gelu_and_mul(call: Invocation) -> Form:
    return gated(call, {"none": "gelu", "tanh": "gelu_tanh"}.get(call["approximate"], ""))


@family("rope", *(f"sglang_op::{name}" for name in ROTARY))
def rotary_embedding(call: Invocation) -> Form:
    """It returns new tensors. Heads lie side by side or in a dimension of their own."""
    call.refuse("offsets", "fused_set_kv_buffer_arg")
    positions, size = call.tensor("positions"), int(call.number("head_size"))
    table, tokens = call.tensor("cos_sin_cache"), positions.numel()
    if table.shape[-1] != call.number("rotary_dim"):
        raise Unrecognized("its table is of another width than what it rotates")

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(tokens, -1, size)

    return rope(
        Rope(
            q=heads(call.tensor("query")),
            k=heads(call.tensor("key")),
            cos_sin_cache=table,
            positions=positions.flatten(),
            is_neox=bool(call["is_neox_style"]),
            q_out=lambda: heads(call.result[0]),
            k_out=lambda: heads(call.result[1]),
            copies=True,
        )
    )

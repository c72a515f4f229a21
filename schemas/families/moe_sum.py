"""moe_sum: what a token's experts made, added up."""

from __future__ import annotations

import torch

from kcap.schemas.families import family
from kcap.schemas.families.form import Form, abbreviate, made, of
from kcap.schemas.families.invocation import Invocation

REFERENCE = """import torch


@torch.no_grad()
def run(expert_outputs):
    assert expert_outputs.shape[1:] == ({k}, {h})
    return (expert_outputs.to(torch.float32).sum(dim=1) * {scale!r}).to(expert_outputs.dtype)
"""


@family("moe_sum", "_moe_C::moe_sum", "sgl_kernel::moe_sum", "sgl_kernel::moe_sum_reduce")
def moe_sum(call: Invocation) -> Form:
    """`input`: [seq_len, top_k, hidden_size]. SGLang's `moe_sum_reduce` scales the sum."""
    x, scale = call.tensor("input"), float(call["routed_scaling_factor"] or 1.0)
    tokens, k, h = x.shape
    word = abbreviate(x.dtype, torch.bfloat16) + (f"_scale{scale:g}" if scale != 1.0 else "")
    return Form(
        name=f"moe_sum{word}_topk{k}_h{h}",
        op_type="moe",
        axes={"seq_len": None, "top_k": k, "hidden_size": h},
        inputs={"expert_outputs": of(x, "seq_len", "top_k", "hidden_size")},
        outputs={"output": made(x.dtype, ("seq_len", "hidden_size"), lambda: call.tensor("output"))},
        reference=REFERENCE.format(k=k, h=h, scale=scale),
        description="The sum over each token's experts.",
        flops=tokens * k * h,
    )

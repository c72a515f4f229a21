"""qk_rmsnorm: the heads of queries and keys normed in one kernel, each in its place (Qwen3).

SGLang's operator, which sglang/srt/models/utils.py of 0.5.15 and 0.5.23 registers.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function, family
from kcap.schemas.derive.invocation import Invocation, Unrecognized
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, tensor_arg

REFERENCE = """import torch


@torch.no_grad()
def run(q, k, q_weight, k_weight):
    assert q.shape[-1] == {d} and k.shape[-1] == {d}

    def normed(x, weight):
        x = x.to(torch.float32)
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + {eps!r}) * weight.to(torch.float32)

    return normed(q, q_weight).to(q.dtype), normed(k, k_weight).to(k.dtype)
"""


@family("qk_rmsnorm", "sglang::fused_inplace_qknorm")
def fused_inplace_qknorm(call: Invocation) -> KernelInstance:
    """`q`: [num_tokens, num_qo_heads, head_dim], `k`: [num_tokens, num_kv_heads, head_dim]; the weights: [head_dim]."""
    q, k = call.tensor("q"), call.tensor("k")
    eps, d = float(call.number("eps")), q.shape[-1]
    if q.dim() != 3 or k.dim() != 3 or (len(k), k.shape[-1]) != (len(q), d) or call["head_dim"] not in (None, 0, d):
        raise Unrecognized("no heads of queries and keys of the same tokens")
    axes = {"q": ("num_tokens", "num_qo_heads", "head_dim"), "k": ("num_tokens", "num_kv_heads", "head_dim")}
    word = abbreviate(q.dtype, torch.bfloat16) + ("" if eps == 1e-5 else f"_eps{eps:g}")
    return KernelInstance(
        name=f"qk_rmsnorm{word}_h{q.shape[1]}_kv{k.shape[1]}_d{d}",
        op_type="rmsnorm",
        axes={"num_tokens": None, "num_qo_heads": q.shape[1], "num_kv_heads": k.shape[1], "head_dim": d},
        inputs={
            "q": tensor_arg(q, *axes["q"]),
            "k": tensor_arg(k, *axes["k"]),
            "q_weight": tensor_arg(call.tensor("q_weight"), "head_dim"),
            "k_weight": tensor_arg(call.tensor("k_weight"), "head_dim"),
        },
        outputs={"q_out": lazy_arg(q.dtype, axes["q"], lambda: q), "k_out": lazy_arg(k.dtype, axes["k"], lambda: k)},
        reference=REFERENCE.format(d=d, eps=eps),
        description=f"Root mean square norms of each head of the queries and keys, epsilon {eps:g}.",
        tags=("fused",),
        flops=4 * (q.numel() + k.numel()),
    )


cost_function("qk_rmsnorm")(CostInputs.whole)

"""gqa_ragged: attention over keys and values without a cache. FlashInfer's wrapper, and aten's for encoders.

FlashAttention without a page table is ragged, too: gqa_paged.py knows its operators.
"""

from __future__ import annotations

import torch

from kcap.schemas.families import family, wrapper
from kcap.schemas.families.form import Form
from kcap.schemas.families.invocation import Invocation, Unrecognized
from kcap.schemas.families.ragged import Ragged, ragged


@family("gqa_ragged", "flashinfer::BatchPrefillWithRaggedKVCacheWrapper")
def flashinfer_ragged(call: Invocation) -> Form:
    """FlashInfer's, of its run together with its plan; its log-sum-exp is of base 2 as it comes."""
    wrapper.refuse(call)
    call.refuse("plan.v_indptr", "plan.o_indptr")
    q = call.tensor("q")
    return ragged(
        Ragged(
            q=q,
            k=call.tensor("k"),
            v=call.tensor("v"),
            starts=call.tensor("plan.qo_indptr"),
            kv_starts=call.tensor("plan.kv_indptr"),
            scale=wrapper.scale(call, q.shape[-1]),
            output=lambda: wrapper.returned(call, 0),
            lse=(lambda: wrapper.returned(call, 1)) if call["return_lse"] else None,
            causal=bool(call["plan.causal"]),
            window=wrapper.window(call),
        )
    )


@family("gqa_ragged", "aten::scaled_dot_product_attention")
def scaled_dot_product_attention(call: Invocation) -> Form:
    """aten's, [batch, heads, tokens, dim]: sequences of one length. Its causal mask counts from the first key."""
    call.refuse("attn_mask", "dropout_p")
    q, k, v = call.tensor("query"), call.tensor("key"), call.tensor("value")
    if q.dim() != 4 or (call["is_causal"] and q.shape[2] != k.shape[2]):
        raise Unrecognized("no batch of heads, or a causal mask that begins at the first key")
    if q.shape[0] != k.shape[0] or (q.shape[1] != k.shape[1] and not call["enable_gqa"]):
        raise Unrecognized("keys are broadcast")
    return ragged(
        Ragged(
            q=joined(q),
            k=joined(k),
            v=joined(v),
            starts=starts(q),
            kv_starts=starts(k),
            scale=q.shape[-1] ** -0.5 if call["scale"] is None else float(call.number("scale")),
            output=lambda: joined(call.result),
            causal=bool(call["is_causal"]),
        )
    )


def joined(heads: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, dim] as [batch · tokens, heads, dim]."""
    return heads.transpose(1, 2).flatten(0, 1)


def starts(heads: torch.Tensor) -> torch.Tensor:
    """Where each sequence of [batch, heads, tokens, dim] begins, once they are joined."""
    return torch.arange(heads.shape[0] + 1, dtype=torch.int32) * heads.shape[2]

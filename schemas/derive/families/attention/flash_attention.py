"""FlashAttention 2 and 3 (arXiv:2307.08691, arXiv:2407.08608), which vLLM and SGLang call for every kind of attention.

Over a paged cache it is gqa_paged, over keys and values as they are gqa_ragged, over latents mla_paged.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kcap.schemas.derive.families import family
from kcap.schemas.derive.families.attention.core import AttentionVariant, base2_lse, refuse_unless_one
from kcap.schemas.derive.families.attention.gqa_paged import SINKS_LSE, PagedAttention, paged_attention
from kcap.schemas.derive.families.attention.gqa_ragged import RaggedAttention, ragged_attention
from kcap.schemas.derive.families.attention.mla_paged import LatentAttention, latent_attention
from kcap.schemas.derive.families.attention.pages import PagedBatch, PageTable, table_pages
from kcap.schemas.derive.invocation import Invocation, Unrecognized
from kcap.schemas.derive.kernel import KernelInstance, OperatorFacts

SPLIT_SUMS = {"_vllm_fa3_C::fwd": 2, "_vllm_fa2_C::varlen_fwd": 0}  # results beside the output and its log-sum-exp
UNMODELLED = (  # cu_seqlens_k_new, which SGLang always passes, is not read without new keys
    *("k_new", "v_new", "seqused_q", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "attention_chunk"),
    *("alibi_slopes", "p_dropout", "cp_tot_seqused_k", "sparse_mask_fine", "only_qv"),
)


@family("gqa_paged", "_vllm_fa3_C::fwd", "_vllm_fa2_C::varlen_fwd", "sgl_kernel::fwd")
def flash_attention(call: Invocation) -> KernelInstance:
    """Without a page table the batch is ragged; with a second part of the queries the caches hold latents."""
    call.refuse(*UNMODELLED)
    refuse_unless_one(call, "cp_world_size")
    q, k, variant = call.tensor("q"), call.tensor("k"), attention_variant(call)
    if q.dim() != 3:
        raise Unrecognized("no batch of joined sequences")
    attention = RaggedAttention(
        q=q,
        k=k,
        v=call.tensor("v"),
        starts=call.tensor("cu_seqlens_q"),
        kv_starts=call.optional("cu_seqlens_k"),
        scale=q.shape[-1] ** -0.5 if call["softmax_scale"] is None else float(call.number("softmax_scale")),
        output=lambda: call.result[0] if call["out"] is None else call.tensor("out"),
        lse=None if variant.has_sinks else lambda: base2_lse(call.result[1]),
        variant=variant,
    )
    table, q_v = call.optional("page_table", "block_table"), call.optional("q_v", "qv")
    if table is not None and q_v is not None:
        return replace(_latent(call, attention, table, q_v), family="mla_paged")
    call.refuse("q_v", "qv")
    if table is not None:
        return _with_table(call, attention, table)
    call.refuse("seqused_k")
    return replace(ragged_attention(attention), family="gqa_ragged")


def attention_variant(call: Invocation) -> AttentionVariant:
    """`window_size_right`: under a causal mask the operator takes it for 0, without one -1 is no bound.

    What the log-sum-exp is beside sinks is not documented: such a Definition has none.
    """
    right = -1 if call["window_size_right"] is None else int(call.number("window_size_right"))
    causal = bool(call["is_causal"]) or right == 0
    return AttentionVariant(
        causal=causal,
        window=int(call.number("window_size_left")),
        right=-1 if causal else right,
        softcap=float(call.number("softcap")) if call["softcap"] else 0.0,
        sinks=call.optional("s_aux", "sinks"),
    )


def _batch(call: Invocation, attention: RaggedAttention, table: torch.Tensor) -> PagedBatch:
    lengths = call.tensor("seqused_k")
    return PagedBatch(
        tokens=len(attention.q),
        pages=table_pages(table, lengths, attention.k.shape[1]),
        starts=attention.starts,
        decode=call["max_seqlen_q"] == 1 and len(attention.q) == len(lengths),
    )


def _with_table(call: Invocation, attention: RaggedAttention, table: torch.Tensor) -> KernelInstance:
    return paged_attention(
        PagedAttention(
            q=attention.q,
            k=attention.k,
            v=attention.v,
            batch=_batch(call, attention, table),
            table=_page_table(call, attention, table),
            scale=attention.scale,
            output=attention.output,
            lse=attention.lse,
            variant=attention.variant,
        )
    )


HINTS = ("max_seqlen_k", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata")
SGLANG = "what it returns beside its output is not known"


def _page_table(call: Invocation, attention: RaggedAttention, table: torch.Tensor) -> PageTable | str:
    """Its schema calls the queries written, which only a rotation in the kernel does (refused). Of what it returns the
    output is the argument, and the sums of its splits are nobody's: here they are empty."""
    if attention.lse is None:
        return SINKS_LSE
    if call.base not in SPLIT_SUMS:
        return SGLANG

    def returned() -> list[torch.Tensor]:
        q, out = attention.q, call["out"]
        lse = torch.empty(q.shape[1], len(q), dtype=torch.float32, device=q.device)
        sums = [torch.empty(0, dtype=torch.float32, device=q.device) for _ in range(SPLIT_SUMS[call.base])]
        return [torch.empty_like(q) if out is None else out, lse, *sums]

    return PageTable(table, call.tensor("seqused_k"), OperatorFacts(HINTS, ("q",), returned), lambda: call.result[1])


def _latent(call: Invocation, attention: RaggedAttention, table: torch.Tensor, q_nope: torch.Tensor) -> KernelInstance:
    """DeepSeek's: `k` holds the rotated part of each key, `v` the latent, which is its rest and the value."""
    k, v = attention.k, attention.v
    if k.shape[2] != 1 or v.shape[2] != 1 or attention.variant.words:
        raise Unrecognized("it has several heads of keys, a window, sinks or a bound of the logits")
    return latent_attention(
        LatentAttention(
            q_nope=q_nope,
            q_pe=attention.q,
            ckv=v[:, :, 0],
            kpe=k[:, :, 0],
            batch=_batch(call, attention, table),
            scale=attention.scale,
            output=attention.output,
            lse=attention.lse,
            causal=attention.variant.causal,
        )
    )

"""gqa_paged: attention of grouped queries over a paged cache. Operators of vLLM, SGLang and FlashInfer in C++."""

from __future__ import annotations

from dataclasses import replace

import torch

from kcap.schemas.families import family, wrapper
from kcap.schemas.families.attention import base2, refuse_unless_one
from kcap.schemas.families.cpu_cache import unpacked
from kcap.schemas.families.form import Form
from kcap.schemas.families.invocation import Invocation, Unrecognized
from kcap.schemas.families.paged import Paged, paged
from kcap.schemas.families.pages import Batch, listed_pages, table_pages
from kcap.schemas.families.ragged import Ragged, ragged

UNMODELLED = (
    *("k_new", "v_new", "q_v", "qv", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k", "rotary_cos"),
    *("rotary_sin", "softcap", "s_aux", "sinks", "attention_chunk", "alibi_slopes", "p_dropout", "cp_tot_seqused_k"),
)


@family("gqa_paged", "_C::cpu_attention_with_kv_cache")
def cpu_attention(call: Invocation) -> Form:
    """vLLM's on CPU. Its window counts the query's own key. The metadata tells how the caches are laid out."""
    call.refuse("alibi_slopes", "softcap", "s_aux", "dynamic_causal")
    q, lengths, window = call.tensor("query"), call.tensor("seq_lens"), int(call.number("sliding_window_size"))
    k, v = unpacked(call.tensor("key_cache"), call.tensor("value_cache"), call.optional("scheduler_metadata"))
    return paged(
        Paged(
            q=q,
            k=k,
            v=v,
            batch=Batch(
                tokens=len(q),
                pages=table_pages(call.tensor("block_table"), lengths, k.shape[1]),
                starts=call.tensor("query_start_loc"),
                decode=len(q) == len(lengths),
            ),
            scale=float(call.number("scale")),
            output=lambda: call.tensor("output"),
            causal=bool(call["causal"]),
            window=window - 1 if window > 0 else -1,
        )
    )


@family("gqa_paged", "_vllm_fa3_C::fwd", "_vllm_fa2_C::varlen_fwd", "sgl_kernel::fwd")
def flash_attention(call: Invocation) -> Form:
    """FlashAttention 2 and 3 (arXiv:2307.08691, arXiv:2407.08608); without a page table the batch is ragged."""
    call.refuse(*UNMODELLED)
    refuse_unless_one(call, "cp_world_size")
    q, k, right = call.tensor("q"), call.tensor("k"), call["window_size_right"]
    if q.dim() != 3 or (right or 0) > 0:
        raise Unrecognized("no batch of joined sequences, or keys after a query's own are in its window")
    one = Ragged(
        q=q,
        k=k,
        v=call.tensor("v"),
        starts=call.tensor("cu_seqlens_q"),
        kv_starts=call.optional("cu_seqlens_k"),
        scale=q.shape[-1] ** -0.5 if call["softmax_scale"] is None else float(call.number("softmax_scale")),
        output=lambda: call.result[0] if call["out"] is None else call.tensor("out"),
        lse=lambda: base2(call.result[1]),
        causal=bool(call["is_causal"]) or right == 0,
        window=int(call.number("window_size_left")),
    )
    table = call.optional("page_table", "block_table")
    if table is not None:
        return _with_table(call, one, table)
    call.refuse("seqused_k")
    return replace(ragged(one), family="gqa_ragged")


def _with_table(call: Invocation, one: Ragged, table: torch.Tensor) -> Form:
    lengths = call.tensor("seqused_k")
    return paged(
        Paged(
            q=one.q,
            k=one.k,
            v=one.v,
            batch=Batch(
                tokens=len(one.q),
                pages=table_pages(table, lengths, one.k.shape[1]),
                starts=one.starts,
                decode=call["max_seqlen_q"] == 1 and len(one.q) == len(lengths),
            ),
            scale=one.scale,
            output=one.output,
            lse=one.lse,
            causal=one.causal,
            window=one.window,
        )
    )


@family("gqa_paged", "flashinfer::BatchDecodeWithPagedKVCacheWrapper")
def flashinfer_decode(call: Invocation) -> Form:
    return _wrapped(call, "plan.indptr", "plan.indices", "plan.last_page_len", None)


@family("gqa_paged", "flashinfer::BatchPrefillWithPagedKVCacheWrapper")
def flashinfer_prefill(call: Invocation) -> Form:
    names = ("plan.paged_kv_indptr", "plan.paged_kv_indices", "plan.paged_kv_last_page_len")
    return _wrapped(call, *names, call.tensor("plan.qo_indptr"))


def _wrapped(call: Invocation, indptr: str, indices: str, last: str, starts: torch.Tensor | None) -> Form:
    """A FlashInfer wrapper's run with its plan; its log-sum-exp is of base 2 as it comes."""
    wrapper.refuse(call)
    (k, v), q, lasts = wrapper.cache(call), call.tensor("q"), call.tensor(last)
    one = Paged(
        q=q,
        k=k,
        v=v,
        batch=Batch(
            tokens=len(q),
            pages=listed_pages(call.tensor(indptr), call.tensor(indices), lambda: lasts, k.shape[1]),
            starts=starts,
            decode=starts is None,
        ),
        scale=wrapper.scale(call, q.shape[-1]),
        output=lambda: wrapper.returned(call, 0),
        lse=(lambda: wrapper.returned(call, 1)) if call["return_lse"] else None,
        causal=starts is None or bool(call["plan.causal"]),
        window=wrapper.window(call),
    )
    return paged(one)

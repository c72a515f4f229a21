"""mla_paged: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over a paged cache, with FlashInfer's names.

Operators of FlashInfer, FlashMLA and vLLM on CPU. Left out, because two launches are one kernel there: Triton's decode.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from kcap.schemas.families import family, wrapper
from kcap.schemas.families.attention import Make, base2
from kcap.schemas.families.form import Form
from kcap.schemas.families.invocation import Invocation, Unrecognized
from kcap.schemas.families.latent import Latent, latent
from kcap.schemas.families.pages import Batch, last_lengths, listed_pages, table_pages

DENSE = ("q", "kcache", "head_size_v", "seqlens_k", "block_table", "softmax_scale", "is_causal")


@family("mla_paged", "flashinfer::BatchMLAPagedAttentionWrapper")
def flashinfer_mla(call: Invocation) -> Form:
    """FlashInfer's, of its run together with its plan."""
    wrapper.refuse(call)
    lengths, starts = call.tensor("plan.kv_len_arr"), call.tensor("plan.qo_indptr")
    q, ckv = call.tensor("q_nope"), call.tensor("ckv_cache")
    page_size = ckv.shape[1]

    def lse() -> torch.Tensor:
        made: torch.Tensor = wrapper.returned(call, 1)
        return made / math.log(2.0) if call["return_lse_base_on_e"] else made

    indptr, indices = call.tensor("plan.kv_indptr"), call.tensor("plan.kv_indices")
    return latent(
        Latent(
            q_nope=q,
            q_pe=call.tensor("q_pe"),
            ckv=ckv,
            kpe=call.tensor("kpe_cache"),
            batch=Batch(
                tokens=len(q),
                pages=listed_pages(indptr, indices, lambda: last_lengths(lengths, page_size), page_size),
                starts=starts,
                decode=len(q) == len(lengths),
            ),
            scale=float(call.number("plan.sm_scale")),
            output=lambda: wrapper.returned(call, 0),
            lse=lse if call["return_lse"] else None,
            causal=bool(call["plan.causal"]),
        )
    )


@family("mla_paged", "_C::mla_decode_kvcache")
def cpu_decode(call: Invocation) -> Form:
    """vLLM's on CPU: [tokens, heads, latent + rotated], the cache [pages, rows of a page, latent + rotated]."""
    out = call.tensor("out")
    q, cache, lengths = call.tensor("query"), call.tensor("kv_cache"), call.tensor("seq_lens")
    return decode(call, q, cache, out.shape[-1], table_of(call, "block_tables", lengths, q, cache), lambda: out, None)


@family(
    "mla_paged",
    "_flashmla_C::dense_decode_fwd",
    "_flashmla_C::fwd_kvcache_mla",
    "sgl_kernel::dense_decode_fwd",
    "sgl_kernel::fwd_kvcache_mla",
)
def flash_mla(call: Invocation) -> Form:
    """FlashMLA with one query a sequence: [sequences, 1, heads, latent + rotated]; its log-sum-exp is natural."""
    given = named(call)
    given.refuse("is_fp8", "indices", "attn_sink", "extra_k_cache", "vcache")
    q, cache = given.tensor("q"), given.tensor("kcache", "kv_cache")
    if q.dim() != 4 or q.shape[1] != 1 or cache.dim() != 4 or cache.shape[2] != 1:
        raise Unrecognized("it has several queries a sequence, or several heads of keys")
    q, cache = q[:, 0], cache[:, :, 0]
    batch = table_of(given, "block_table", given.tensor("seqlens_k"), q, cache)
    size = int(given.number("head_size_v"))
    return decode(given, q, cache, size, batch, lambda: call.result[0][:, 0], lambda: base2(call.result[1][:, :, 0].mT))


def named(call: Invocation) -> Invocation:
    """`call` with FlashMLA's names where its schema has none (vLLM 0.22 calls them `_0`, `_1` …)."""
    if "_0" not in call.arguments:
        return call
    return replace(call, arguments=dict(zip(DENSE, call.arguments.values(), strict=False)))


def table_of(call: Invocation, table: str, lengths: torch.Tensor, q: torch.Tensor, cache: torch.Tensor) -> Batch:
    """A decode's batch, from a block table."""
    pages = table_pages(call.tensor(table), lengths, cache.shape[1])
    return Batch(tokens=len(q), pages=pages, starts=None, decode=True)


def decode(
    call: Invocation, q: torch.Tensor, cache: torch.Tensor, latents: int, batch: Batch, output: Make, lse: Make | None
) -> Form:
    """A decode over queries and a cache whose last dimension is the latent, then the rotated part."""
    return latent(
        Latent(
            q_nope=q[..., :latents],
            q_pe=q[..., latents:],
            ckv=cache[..., :latents],
            kpe=cache[..., latents:],
            batch=batch,
            scale=float(call.number("softmax_scale", "scale")),
            output=output,
            lse=lse,
        )
    )

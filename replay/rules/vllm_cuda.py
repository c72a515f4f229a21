"""Rules for the operators of vLLM's CUDA build (read in vllm/_custom_ops.py and vllm_flash_attn, vLLM 0.22.1)."""

from __future__ import annotations

from typing import Any

import torch

from kcap.replay.bind import Bound
from kcap.replay.inputs import Inputs
from kcap.replay.layout import torch_dtype
from kcap.replay.rules import Rule, argument, rule
from kcap.replay.rules.paging import renumber, shrink, table_in_use
from kcap.replay.rules.vllm import below, cache_slots, slots_touched, zeros
from kcap.replay.skip import Skip


@rule("_C_cache_ops::reshape_and_cache_flash")
class ReshapeAndCacheFlash(Rule):
    """Caches are [pages, rows of a page, heads, head size]."""

    harmless = ("key_cache", "value_cache")

    def prepare(self, bound: Bound) -> None:
        cache_slots(bound, bound.spec("key_cache").shape[1], self.harmless)

    def touched(self, bound: Bound, total: int) -> int:
        return slots_touched(bound, total, bound.spec("key_cache").shape[1], self.harmless)


@rule("_C_cache_ops::reshape_and_cache")
class ReshapeAndCache(Rule):
    """Caches are [pages, heads, head size / x, rows, x] and [pages, heads, head size, rows]."""

    harmless = ("key_cache", "value_cache")

    def prepare(self, bound: Bound) -> None:
        cache_slots(bound, bound.spec("value_cache").shape[3], self.harmless)


@rule("_C_cache_ops::concat_and_cache_mla")
class ConcatAndCacheMla(Rule):
    """The cache is [pages, rows of a page, latent size]."""

    harmless = ("kv_cache",)

    def prepare(self, bound: Bound) -> None:
        cache_slots(bound, bound.spec("kv_cache").shape[1], self.harmless)

    def touched(self, bound: Bound, total: int) -> int:
        return slots_touched(bound, total, bound.spec("kv_cache").shape[1], self.harmless)


class PagedAttention(Rule):
    """Attention over caches [pages, rows of a page, heads, head size]; names differ between the kernels."""

    table = "block_table"
    lengths = "seqused_k"
    starts = "cu_seqlens_q"

    def prepare(self, bound: Bound) -> None:
        lengths, starts = bound.content(self.lengths), bound.content(self.starts)
        if bound[self.starts] is not None and starts is None:
            raise Skip("no Sample holds its query starts")
        if bound[self.table] is None:
            return
        table = bound.content(self.table)
        if table is None or lengths is None:
            raise Skip("no Sample holds its block table and sequence lengths")
        dense, pages = renumber(table_in_use(table, lengths, bound.spec("k").shape[1]))
        bound.set_content(self.table, dense)
        shrink(bound, ("k", "v"), pages)


@rule("_vllm_fa2_C::varlen_fwd")
class FlashAttention2(PagedAttention):
    def prepare(self, bound: Bound) -> None:
        super().prepare(bound)
        if bound[self.table] is not None:
            zeros(bound, "cu_seqlens_k")  # a placeholder beside seqused_k: vLLM passes uninitialized memory


@rule("_vllm_fa3_C::fwd")
class FlashAttention3(PagedAttention):
    """`scheduler_metadata` is made again by the operator that made it, from the same lengths."""

    table = "page_table"
    remade = ("scheduler_metadata",)

    def remake(self, bound: Bound, inputs: Inputs) -> dict[str, Any]:
        q, k, v = bound.spec("q"), bound.spec("k"), bound.spec("v")
        starts = argument(bound, inputs, "cu_seqlens_q")
        metadata = torch.ops._vllm_fa3_C.get_scheduler_metadata(
            q.shape[0] if starts is None else len(starts) - 1,
            bound["max_seqlen_q"],
            bound["max_seqlen_k"],
            q.shape[-2],
            k.shape[-2],
            q.shape[-1],
            v.shape[-1],
            torch_dtype(q.dtype),
            argument(bound, inputs, "seqused_k"),
            starts,
            None,  # cu_seqlens_k
            None,  # cu_seqlens_k_new
            None,  # seqused_q
            None,  # leftpad_k
            None if bound["page_table"] is None else k.shape[1],
            0,  # max_seqlen_k_new
            bound["is_causal"],
            bound["window_size_left"],
            bound["window_size_right"],
            bool(bound["softcap"]),
            bound["num_splits"],
            bound["pack_gqa"],
            bound["sm_margin"],
        )
        return {"scheduler_metadata": metadata}


@rule("_moe_C::topk_softmax", "_moe_C::topk_sigmoid", "_moe_C::topk_softplus_sqrt")
class TopK(Rule):
    def prepare(self, bound: Bound) -> None:
        zeros(bound, "topk_indices", "token_expert_indices")


@rule("_moe_C::moe_align_block_size")
class MoeAlign(Rule):
    def prepare(self, bound: Bound) -> None:
        experts = bound.integer("num_experts")
        below(bound, "topk_ids", experts)
        zeros(bound, "sorted_token_ids", "experts_ids", "num_tokens_post_pad")
        if bound["maybe_expert_map"] is not None:
            below(bound, "maybe_expert_map", experts)

"""Replay rules of attention: block tables cut to the pages in use, scheduler metadata rebuilt from a Sample's lengths.

Read in vllm/_custom_ops.py, v1/attention/backends/cpu_attn.py and vllm_flash_attn (vLLM 0.22.1).
"""

from __future__ import annotations

from typing import Any

import torch

from kcap.schemas.derive.bound_call import BoundCall, Inputs, Skip
from kcap.schemas.derive.families import ReplayRule, rebuilt_argument, replay_rule
from kcap.schemas.derive.index_arguments import renumber_densely, set_zeros, shrink_caches, table_in_use
from kcap.schemas.derive.invocation import torch_dtype
from kcap.schemas.recording.values import TensorSpec

DENSE = ("q", "kcache", "head_size_v", "seqlens_k", "block_table", "softmax_scale", "is_causal")  # FlashMLA's
CPU_CACHES = ("key_cache", "value_cache")  # [pages, heads, rows of a page, head size]


NO_BATCH = "no Sample, and no step that lists its sequences,"


def use_dense_pages(bound: BoundCall, table: str, lengths: str, page_size: int, caches: tuple[str, ...]) -> None:
    """Renumber the pages in use densely and cut the caches down to them. Without a recorded table each sequence gets
    pages of its own."""
    tokens, recorded = bound.content(lengths), bound.content(table)
    if tokens is None:
        raise Skip(f"{NO_BATCH} holds its sequence lengths")
    spec = bound.spec(table)
    own = recorded if recorded is not None else torch.arange(spec.numel).reshape(spec.shape)
    dense, pages = renumber_densely(table_in_use(own, tokens, page_size))
    bound.set_content(table, dense)
    shrink_caches(bound, caches, pages)


def use_dense_slots(bound: BoundCall, sequences: int) -> None:
    """Likewise for SGLang's list of slots, which `kv_indptr` ends at the last of the `sequences`."""
    ends, recorded = bound.content("kv_indptr"), bound.content("kv_indices")
    if ends is None or recorded is None:
        raise Skip("no Sample holds its 'kv_indices'")
    dense, count = renumber_densely(recorded[: int(ends[sequences])])
    bound.set_content("kv_indices", torch.nn.functional.pad(dense, (0, len(recorded) - len(dense))))
    shrink_caches(bound, ("K_Buffer", "V_Buffer"), count)


@replay_rule("triton::_fwd_kernel")
class ExtendRule(ReplayRule):
    """SGLang's prefill beside what is cached; other kernels of this name take no list of slots."""

    def prepare(self, bound: BoundCall) -> None:
        if isinstance(bound["kv_indices"], TensorSpec):
            use_dense_slots(bound, bound.spec("qo_indptr").numel - 1)


@replay_rule("_C::cpu_attention_with_kv_cache")
class CpuAttention(ReplayRule):
    """The scheduler's metadata points into itself, so it is rebuilt from the Sample's lengths."""

    rebuilt_args = ("scheduler_metadata",)

    def prepare(self, bound: BoundCall) -> None:
        if bound.content("query_start_loc") is None:
            raise Skip(f"{NO_BATCH} holds its query starts")
        use_dense_pages(bound, "block_table", "seq_lens", bound.spec("key_cache").shape[2], CPU_CACHES)

    def rebuild_args(self, bound: BoundCall, inputs: Inputs) -> dict[str, Any]:
        query, cache = bound.spec("query"), bound.spec("key_cache")
        kv_dtype = bound["kv_cache_dtype"] or "auto"
        metadata = torch.ops._C.get_scheduler_metadata(
            bound.spec("seq_lens").shape[0],
            query.shape[1],
            cache.shape[1],
            query.shape[2],
            rebuilt_argument(bound, inputs, "seq_lens"),
            torch_dtype(query.dtype, Skip),
            rebuilt_argument(bound, inputs, "query_start_loc"),
            bound["causal"],
            bound["sliding_window_size"],
            instruction_set(torch_dtype(query.dtype, Skip), cache.shape[2], query.shape[2], str(kv_dtype)),
            True,
            rebuilt_argument(bound, inputs, "dynamic_causal"),
            kv_dtype,
        )
        return {"scheduler_metadata": metadata}


def instruction_set(dtype: torch.dtype, page_size: int, head_size: int, kv_dtype: str) -> str:
    """The instruction set that vLLM picks on this machine: it laid out the cache and the metadata by it."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        raise Skip("this vLLM does not say which instruction set its attention uses") from None
    try:
        return str(_get_attn_isa(dtype, page_size, head_size, kv_dtype))
    except TypeError:  # older releases do not know the cache's dtype
        return str(_get_attn_isa(dtype, page_size, head_size))


def set_equal_sequences(bound: BoundCall, starts: str, rows: str, longest: str) -> None:
    """Set unknown starts of sequences that must all be as long as the longest one, to have all rows: windows of a
    picture."""
    spec, size = bound[starts], bound[longest]
    if not isinstance(spec, TensorSpec) or not isinstance(size, int) or bound.content(starts) is not None:
        return
    if (spec.shape[0] - 1) * size == bound.spec(rows).shape[0]:
        bound.set_content(starts, torch.arange(spec.shape[0]) * size)


class PagedAttentionRule(ReplayRule):
    """Attention over caches [pages, rows of a page, heads, head size]; names differ between the kernels."""

    table = "block_table"
    lengths = "seqused_k"
    starts = "cu_seqlens_q"

    def prepare(self, bound: BoundCall) -> None:
        for starts, rows, longest in ((self.starts, "q", "max_seqlen_q"), ("cu_seqlens_k", "k", "max_seqlen_k")):
            set_equal_sequences(bound, starts, rows, longest)
        if bound[self.starts] is not None and bound.content(self.starts) is None:
            raise Skip(f"{NO_BATCH} holds its query starts")
        if bound[self.table] is not None:
            use_dense_pages(bound, self.table, self.lengths, bound.spec("k").shape[1], ("k", "v"))


@replay_rule("_vllm_fa2_C::varlen_fwd")
class FlashAttention2(PagedAttentionRule):
    def prepare(self, bound: BoundCall) -> None:
        super().prepare(bound)
        if bound[self.table] is not None:
            set_zeros(bound, "cu_seqlens_k")  # a placeholder beside seqused_k: vLLM passes uninitialized memory


@replay_rule("_flashmla_C::dense_decode_fwd")
class FlashMla(ReplayRule):
    """What schedules its tiles is made by a run without it.

    vLLM 0.22's schema names no argument, so that no Sample holds their values: the step's lengths stand in for them.
    """

    rebuilt_args = ("tile_scheduler_metadata", "num_splits")
    unnamed_args = (*DENSE, *rebuilt_args)

    def prepare(self, bound: BoundCall) -> None:
        use_dense_pages(bound, "block_table", "seqlens_k", bound.spec("kcache").shape[1], ("kcache",))

    def rebuild_args(self, bound: BoundCall, inputs: Inputs) -> dict[str, Any]:
        run = torch.ops._flashmla_C.dense_decode_fwd
        _, _, metadata, splits = run(*(rebuilt_argument(bound, inputs, name) for name in DENSE), None, None, None)
        return {"tile_scheduler_metadata": metadata, "num_splits": splits}


@replay_rule("_vllm_fa3_C::fwd")
class FlashAttention3(PagedAttentionRule):
    """`scheduler_metadata` is rebuilt by the operator that made it, from the same lengths."""

    table = "page_table"
    rebuilt_args = ("scheduler_metadata",)
    library = "_vllm_fa3_C"
    chunked: tuple[str, ...] = ()  # what the library's operator takes behind the window

    def rebuild_args(self, bound: BoundCall, inputs: Inputs) -> dict[str, Any]:
        q, k, v = bound.spec("q"), bound.spec("k"), bound.spec("v")
        starts, lengths = rebuilt_argument(bound, inputs, "cu_seqlens_q"), rebuilt_argument(bound, inputs, "seqused_k")
        longest = bound["max_seqlen_k"]
        metadata = getattr(torch.ops, self.library).get_scheduler_metadata(
            q.shape[0] if starts is None else len(starts) - 1,
            bound["max_seqlen_q"],
            int(lengths.max()) if longest is None else longest,
            q.shape[-2],
            k.shape[-2],
            q.shape[-1],
            v.shape[-1],
            torch_dtype(q.dtype, Skip),
            lengths,
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
            *(bound[name] for name in self.chunked),
            bool(bound["softcap"]),
            bound["num_splits"],
            bound["pack_gqa"],
            bound["sm_margin"],
        )
        return {"scheduler_metadata": metadata}


@replay_rule("sgl_kernel::fwd")
class SglangFlashAttention3(FlashAttention3):
    """SGLang leaves the longest context to the page table, and tells it where the metadata is made alone.

    The starts of new keys, which it passes beside latents and in prefills, are not read where there are none.
    """

    library = "sgl_kernel"
    chunked = ("attention_chunk",)

    def prepare(self, bound: BoundCall) -> None:
        super().prepare(bound)
        if bound["k_new"] is None:
            set_zeros(bound, "cu_seqlens_k_new")

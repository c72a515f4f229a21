"""Rules for the operators of vLLM's CPU build (read in vllm/_custom_ops.py and v1/attention/backends/cpu_attn.py)."""

from __future__ import annotations

from typing import Any

import torch

from kcap.replay.bind import Bound
from kcap.replay.fill import draw
from kcap.replay.inputs import Inputs
from kcap.replay.layout import torch_dtype
from kcap.replay.rules import Rule, argument, rule
from kcap.replay.rules.paging import renumber, shrink, table_in_use
from kcap.replay.rules.vllm import below, cache_slots, zeros
from kcap.replay.skip import Skip

CACHES = ("key_cache", "value_cache")  # [pages, heads, rows of a page, head size]
PRIMITIVES = 32  # oneDNN primitives that vLLM keeps per weight


class Handle:
    """A oneDNN matmul: its raw pointer lives as long as this object, and so does the weight."""

    def __init__(self, pointer: int, weight: torch.Tensor) -> None:
        self.tensor = torch.tensor(pointer, dtype=torch.int64)
        self.weight = weight

    def __del__(self) -> None:
        torch.ops._C.release_dnnl_matmul_handler(self.tensor.item())


@rule("_C::onednn_mm")
class OneDnnMm(Rule):
    """The weight hides behind the handler: K is the activation's last dimension, N the output's."""

    remade = ("handler_tensor",)

    def _weight(self, bound: Bound) -> tuple[int, int]:
        return bound.spec("c").shape[-1], bound.spec("a").shape[-1]

    def extra_bytes(self, bound: Bound) -> int:
        n, k = self._weight(bound)
        return 2 * n * k * bound.spec("a").bits // 8  # the weight, and oneDNN's own packed copy of it

    def remake(self, bound: Bound, inputs: Inputs) -> dict[str, Any]:
        n, k = self._weight(bound)
        dtype = bound.spec("a").dtype
        flat = torch.empty(n * k, dtype=torch_dtype(dtype))
        draw(flat.view(torch.uint8), dtype)
        weight = flat.view(n, k)
        handle = Handle(torch.ops._C.create_onednn_mm_handler(weight.t(), PRIMITIVES), weight)
        inputs.keep.append(handle)
        return {"handler_tensor": handle.tensor}


@rule("_C::onednn_scaled_mm")
class OneDnnScaledMm(Rule):
    def prepare(self, bound: Bound) -> None:
        raise Skip("its oneDNN handler hides an int8 weight and its scales, which are no arguments")


@rule("_C::cpu_attn_reshape_and_cache")
class ReshapeAndCache(Rule):
    harmless = CACHES

    def prepare(self, bound: Bound) -> None:
        cache_slots(bound, bound.spec("key_cache").shape[2], CACHES)


@rule("_C::cpu_attention_with_kv_cache")
class Attention(Rule):
    """The scheduler's metadata points into itself, so it is made again from the Sample's lengths."""

    remade = ("scheduler_metadata",)

    def prepare(self, bound: Bound) -> None:
        table, lengths = bound.content("block_table"), bound.content("seq_lens")
        if table is None or lengths is None or bound.content("query_start_loc") is None:
            raise Skip("no Sample holds its block table, sequence lengths and query starts")
        page_size = bound.spec("key_cache").shape[2]
        dense, pages = renumber(table_in_use(table, lengths, page_size))
        bound.set_content("block_table", dense)
        shrink(bound, CACHES, pages)

    def remake(self, bound: Bound, inputs: Inputs) -> dict[str, Any]:
        query, cache = bound.spec("query"), bound.spec("key_cache")
        kv_dtype = bound["kv_cache_dtype"] or "auto"
        metadata = torch.ops._C.get_scheduler_metadata(
            bound.spec("seq_lens").shape[0],
            query.shape[1],
            cache.shape[1],
            query.shape[2],
            argument(bound, inputs, "seq_lens"),
            torch_dtype(query.dtype),
            argument(bound, inputs, "query_start_loc"),
            bound["causal"],
            bound["sliding_window_size"],
            instruction_set(torch_dtype(query.dtype), cache.shape[2], query.shape[2], str(kv_dtype)),
            True,
            argument(bound, inputs, "dynamic_causal"),
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


@rule("_C::compute_slot_mapping_kernel_impl")
class SlotMapping(Rule):
    def prepare(self, bound: Bound) -> None:
        zeros(bound, "slot_mapping")


@rule("_C::cpu_fused_moe")
class FusedMoe(Rule):
    def prepare(self, bound: Bound) -> None:
        below(bound, "topk_id", bound.spec("w13").shape[0])


@rule("_C::fused_experts_cpu")
class FusedExperts(Rule):
    def prepare(self, bound: Bound) -> None:
        below(bound, "topk_ids", bound.spec("w1").shape[0])

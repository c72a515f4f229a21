"""Replay rules of cache updates: slots renumbered densely, caches cut to the pages in use.

Read in vllm/_custom_ops.py (vLLM 0.22.1), sglang/kernels/ops of SGLang 0.5.23 and sglang/jit_kernel of 0.5.15.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.families import ReplayRule, replay_rule
from kcap.schemas.derive.families.attention.replay_rules import CPU_CACHES
from kcap.schemas.derive.index_arguments import renumber_densely, renumber_slots, shrink_caches


def cache_slots(bound: BoundCall, page_size: int, caches: tuple[str, ...]) -> None:
    """Keep the recorded slots on dense pages; without them, one slot a token from the first page on."""
    spec = bound.spec("slot_mapping")
    slots = bound.content("slot_mapping")
    if slots is None:
        room = bound.spec(caches[0]).shape[0] * page_size
        slots = torch.arange(spec.numel).reshape(spec.shape) % max(room, 1)
    dense, pages = renumber_slots(slots, page_size)
    bound.set_content("slot_mapping", dense)
    shrink_caches(bound, caches, pages)


def slots_touched(bound: BoundCall, total: int, page_size: int, caches: tuple[str, ...]) -> int:
    """`total` bytes less the slots of the pages in use that nothing is written to."""
    for name in caches:
        cache = bound.spec(name)
        slots = max(cache.shape[0] * page_size, 1)
        unwritten = max(slots - bound.spec("slot_mapping").numel, 0)
        total -= unwritten * cache.numel * cache.bits // 8 // slots
    return total


def slots_in_use(bound: BoundCall, name: str, skipped: int, caches: tuple[str, ...]) -> None:
    """Renumber the slots called `name` densely and cut the caches, of one row a page, down to them.

    `skipped`, where nothing is written, becomes slot 0, and no other slot does; negative: none is skipped. Without
    recorded slots each token gets one of its own; so do tokens that share one, with which a graph pads a batch, where
    what is written is compared: any of them may be written last.
    """
    spec, slots, first = bound.spec(name), bound.content(name), 1 if skipped >= 0 else 0
    if slots is None:
        slots = torch.arange(spec.numel).reshape(spec.shape) + skipped + 1
    if slots.numel() and int(slots.min()) < 0:
        raise Skip(f"its slots ({name}) are negative: the kernel would stop the GPU")
    slots = torch.where(slots == skipped, -1, slots)
    dense, rows = renumber_densely(slots if bound.timed else unshared(slots))
    bound.set_content(name, torch.where(dense < 0, 0, dense + first))
    shrink_caches(bound, caches, rows + first)


def unshared(slots: torch.Tensor) -> torch.Tensor:
    """`slots` where those that were named before are others, behind the last; negative ones stay."""
    if not slots.numel():
        return slots
    ordered, places = slots.flatten().sort(stable=True)
    again = torch.nn.functional.pad(ordered.diff() == 0, (1, 0)) & (ordered >= 0)
    ordered[again] = torch.arange(int(again.sum()), dtype=slots.dtype) + slots.max() + 1
    return ordered[places.argsort()].reshape(slots.shape)


@replay_rule("sglang::store_cache")
class StoreCache(ReplayRule):
    """Caches are rows of all heads; newer releases skip the slot that pads a graph's batch."""

    idempotent_writes: tuple[str, ...] = ("k_cache", "v_cache")
    slots = "indices"

    def prepare(self, bound: BoundCall) -> None:
        skip_index = bound["reserved_skip_index"]
        skipped = skip_index if isinstance(skip_index, int) else -1
        slots_in_use(bound, self.slots, skipped, self.idempotent_writes)
        bound.set_value("size_limit", 0)  # the rows of the caches
        if skipped >= 0:
            bound.set_value("reserved_skip_index", 0)


@replay_rule("tvm::set_mla_kv_buffer")
class SetMlaKvBuffer(StoreCache):
    """SGLang's: the buffer's rows are tokens. No argument has a name, so that no Sample holds the rows written."""

    idempotent_writes = ("kv_buffer",)
    slots = "loc"
    unnamed_args = ("kv_buffer", "loc", "k_nope", "k_rope", "num_warps", "reserved_skip_index")


@replay_rule("_C::cpu_attn_reshape_and_cache")
class CpuReshapeAndCache(ReplayRule):
    idempotent_writes = CPU_CACHES

    def prepare(self, bound: BoundCall) -> None:
        cache_slots(bound, bound.spec("key_cache").shape[2], CPU_CACHES)


@replay_rule("_C_cache_ops::reshape_and_cache_flash")
class ReshapeAndCacheFlash(ReplayRule):
    """Caches are [pages, rows of a page, heads, head size]."""

    idempotent_writes = ("key_cache", "value_cache")

    def prepare(self, bound: BoundCall) -> None:
        cache_slots(bound, bound.spec("key_cache").shape[1], self.idempotent_writes)

    def touched(self, bound: BoundCall, total: int) -> int:
        return slots_touched(bound, total, bound.spec("key_cache").shape[1], self.idempotent_writes)


@replay_rule("_C_cache_ops::reshape_and_cache")
class ReshapeAndCache(ReplayRule):
    """Caches are [pages, heads, head size / x, rows, x] and [pages, heads, head size, rows]."""

    idempotent_writes = ("key_cache", "value_cache")

    def prepare(self, bound: BoundCall) -> None:
        cache_slots(bound, bound.spec("value_cache").shape[3], self.idempotent_writes)


@replay_rule("_C_cache_ops::concat_and_cache_mla")
class ConcatAndCacheMla(ReplayRule):
    """The cache is [pages, rows of a page, latent size]."""

    idempotent_writes = ("kv_cache",)

    def prepare(self, bound: BoundCall) -> None:
        cache_slots(bound, bound.spec("kv_cache").shape[1], self.idempotent_writes)

    def touched(self, bound: BoundCall, total: int) -> int:
        return slots_touched(bound, total, bound.spec("kv_cache").shape[1], self.idempotent_writes)

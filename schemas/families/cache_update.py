"""cache_update: new keys and values written to their slots of a paged cache. Operators of vLLM, SGLang, FlashInfer.

A slot is page · page size + row; a negative one is padding, and nothing is written for it. Newer SGLang may be told of
a slot that it skips. Which token stays, where two have one slot, is nobody's promise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kcap.schemas.families import family, wrapper
from kcap.schemas.families.attention import known
from kcap.schemas.families.cpu_cache import unpacked
from kcap.schemas.families.form import Form, Slot, abbreviate, made, of
from kcap.schemas.families.invocation import Invocation, Unrecognized
from kcap.schemas.families.results import size

REFERENCE = """import torch


@torch.no_grad()
def run(k, v, k_cache, v_cache, slot_mapping):
    assert k_cache.shape[1:] == v_cache.shape[1:] == ({ps}, {kv}, {d})
    written = {written}
    slots = slot_mapping[written].long()
    k_cache_out = k_cache.clone(memory_format=torch.contiguous_format)
    v_cache_out = v_cache.clone(memory_format=torch.contiguous_format)
    k_cache_out.flatten(0, 1)[slots] = k[written]
    v_cache_out.flatten(0, 1)[slots] = v[written]
    return k_cache_out, v_cache_out
"""
CACHE = ("num_pages", "page_size", "num_kv_heads", "head_dim")
ROWS = "Page · page size + row of each token's slot"
SLOTS = f"{ROWS}; nothing is written for a negative one."
Pair = tuple[torch.Tensor, torch.Tensor]


@family("cache_update", "_C::cpu_attn_reshape_and_cache")
def cpu_update(call: Invocation) -> Form:
    key, value = call.tensor("key_cache"), call.tensor("value_cache")
    return update(call, lambda: unpacked(key, value, str(call["isa"])), slots_of(call))


@family("cache_update", "_C_cache_ops::reshape_and_cache_flash")
def flash_update(call: Invocation) -> Form:
    return update(call, lambda: (call.tensor("key_cache"), call.tensor("value_cache")), slots_of(call))


@family("cache_update", "_C_cache_ops::reshape_and_cache")
def split_update(call: Invocation) -> Form:
    """Keys are [pages, heads, dim / x, rows, x], values [pages, heads, dim, rows]."""

    def caches() -> Pair:
        key, value = call.tensor("key_cache"), call.tensor("value_cache")
        return key.permute(0, 3, 1, 2, 4).flatten(3), value.permute(0, 3, 1, 2)

    return update(call, caches, slots_of(call))


@family("cache_update", "sglang::store_cache")
def sglang_update(call: Invocation) -> Form:
    """Rows of all heads together: pages of one row, and one head as wide as all."""

    def caches() -> Pair:
        k, v = (call.tensor(name).flatten(1) for name in ("k_cache", "v_cache"))
        return k[:, None, None, :], v[:, None, None, :]

    return update(call, caches, of(call.tensor("indices"), "num_tokens", description=SLOTS))


@family("cache_update", "flashinfer::append_paged_kv_cache")
def flashinfer_update(call: Invocation) -> Form:
    """A token's slot is the row of its position in the page that its sequence has there."""
    page_size = wrapper.cache(call)[0].shape[1]

    def slots() -> torch.Tensor:
        names = ("kv_indptr", "kv_indices", "batch_indices", "positions")
        indptr, indices, batch, position = (known(call.tensor(name), name).long() for name in names)
        return indices[indptr[batch] + position // page_size] * page_size + position % page_size

    return update(call, lambda: wrapper.cache(call), made("int64", ("num_tokens",), slots, SLOTS))


def slots_of(call: Invocation) -> Slot:
    return of(call.tensor("slot_mapping"), "num_tokens", description=SLOTS)


def update(call: Invocation, caches: Callable[[], Pair], slots: Slot) -> Form:
    """`caches` gives both, [pages, rows of a page, heads, dim], as they are when it is called."""
    k_cache, v_cache = caches()
    page_size, heads, dim = k_cache.shape[1:]
    k, v = (new_rows(call, slots, *names) for names in (("key", "append_key", "k"), ("value", "append_value", "v")))
    k, v = (new.reshape(len(new), heads, dim) for new in (k, v))
    if {k.dtype, v.dtype, v_cache.dtype} != {k_cache.dtype} or v_cache.shape != k_cache.shape:
        raise Unrecognized("its caches are quantized, or of two shapes")
    skipped = call["reserved_skip_index"]
    skips = isinstance(skipped, int) and skipped >= 0
    word = abbreviate(k.dtype, torch.bfloat16) + (f"_skip{skipped}" if skips else "")
    new = ("num_tokens", "num_kv_heads", "head_dim")
    inputs = {"k": of(k, *new), "v": of(v, *new), "k_cache": of(k_cache, *CACHE), "v_cache": of(v_cache, *CACHE)}
    return Form(
        name=f"cache_update{word}_kv{heads}_d{dim}_ps{page_size}",
        op_type="cache_update",
        axes={"num_tokens": None, "num_pages": None, "page_size": page_size, "num_kv_heads": heads, "head_dim": dim},
        inputs={**inputs, "slot_mapping": slots},
        outputs={
            "k_cache_out": made(k.dtype, CACHE, lambda: caches()[0]),
            "v_cache_out": made(v.dtype, CACHE, lambda: caches()[1]),
        },
        reference=REFERENCE.format(
            ps=page_size, kv=heads, d=dim, written=f"slot_mapping != {skipped}" if skips else "slot_mapping >= 0"
        ),
        description="New keys and values are written to a paged cache.",
        touched=lambda: _touched(slots, k, skipped if skips else None),
    )


def _touched(slots: Slot, k: torch.Tensor, skipped: int | None) -> int:
    """Bytes: of a token that is padding, neither key nor value is read."""
    named: torch.Tensor = slots.get()
    rows = len(k) if named.is_meta else int((named >= 0 if skipped is None else named != skipped).sum())
    return int(4 * rows * k[:1].numel() * k.element_size()) + size(named)


def new_rows(call: Invocation, slots: Slot, *names: str) -> torch.Tensor:
    """The new tokens, of which vLLM passes more than there are slots where a graph is padded."""
    rows = call.tensor(*names)
    return rows[: len(slots.value)] if isinstance(slots.value, torch.Tensor) else rows

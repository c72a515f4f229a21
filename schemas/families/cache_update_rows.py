"""cache_update of keys or of values alone, a row for each token: SGLang's caches, written by PyTorch's operator."""

from __future__ import annotations

import torch

from kcap.schemas.families import family
from kcap.schemas.families.cache_update import CACHE, ROWS
from kcap.schemas.families.form import Form, abbreviate, made, of
from kcap.schemas.families.invocation import Invocation, Unrecognized
from kcap.schemas.families.results import size

REFERENCE = """import torch


@torch.no_grad()
def run(new, cache, slot_mapping):
    assert cache.shape[1:] == (1, {kv}, {d})
    cache_out = cache.clone(memory_format=torch.contiguous_format)
    cache_out.flatten(0, 1)[slot_mapping.long()] = new
    return cache_out
"""


@family("cache_update", "aten::index_put_")
def rows_update(call: Invocation) -> Form:
    """The cache: [slots, heads, dim], pages of one row; every token has a slot: one index tensor, and no sums."""
    call.refuse("accumulate")
    cache, new = call.tensor("self"), call.tensor("values")
    match call["indices"]:
        case [torch.Tensor() as slots] if slots.dim() == 1 and slots.dtype in (torch.int32, torch.int64):
            pass
        case _:
            raise Unrecognized("it is no list of rows that is written to")
    if cache.dim() != 3 or new.shape != (len(slots), *cache.shape[1:]) or new.dtype != cache.dtype:
        raise Unrecognized("its table is no cache, or not every row is given")
    heads, dim = cache.shape[1:]
    axes = {"num_tokens": None, "num_pages": None, "page_size": 1, "num_kv_heads": heads, "head_dim": dim}
    return Form(
        name=f"cache_update_rows{abbreviate(new.dtype, torch.bfloat16)}_kv{heads}_d{dim}_ps1",
        op_type="cache_update",
        axes=axes,
        inputs={
            "new": of(new, "num_tokens", "num_kv_heads", "head_dim"),
            "cache": of(cache[:, None], *CACHE),
            "slot_mapping": of(slots, "num_tokens", description=f"{ROWS}."),
        },
        outputs={"cache_out": made(cache.dtype, CACHE, lambda: call.tensor("self")[:, None])},
        reference=REFERENCE.format(kv=heads, d=dim),
        description="New keys, or new values, are written to a cache of rows.",
        touched=lambda: 2 * size(new) + size(slots),
    )

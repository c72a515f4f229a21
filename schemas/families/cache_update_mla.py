"""cache_update of latent attention: a token's latent and its key's rotated part, side by side in one row."""

from __future__ import annotations

import torch

from kcap.schemas.families import family
from kcap.schemas.families.cache_update import slots_of
from kcap.schemas.families.form import Form, abbreviate, made, of
from kcap.schemas.families.invocation import Invocation, Unrecognized
from kcap.schemas.families.results import size

REFERENCE = """import torch


@torch.no_grad()
def run(ckv, kpe, kv_cache, slot_mapping):
    assert ckv.shape[1:] == ({ckv},) and kpe.shape[1:] == ({kpe},)
    assert kv_cache.shape[1:] == ({ps}, {both})
    written = slot_mapping >= 0
    kv_cache_out = kv_cache.clone(memory_format=torch.contiguous_format)
    kv_cache_out.flatten(0, 1)[slot_mapping[written].long()] = torch.cat((ckv, kpe), dim=1)[written]
    return kv_cache_out
"""


@family("cache_update", "_C_cache_ops::concat_and_cache_mla", "_C::concat_and_cache_mla_cpu")
def latent_update(call: Invocation) -> Form:
    """`ckv`: [tokens, latent], `kpe`: [tokens, rotated], the cache: [pages, rows of a page, both]."""
    cache, slots = call.tensor("kv_cache"), slots_of(call)
    tokens = slots.value.shape[0]
    ckv, kpe = (call.tensor(*names)[:tokens] for names in (("kv_c", "kv_c_normed"), ("k_pe",)))
    (page_size, both), (c, p) = cache.shape[1:], (ckv.shape[1], kpe.shape[1])
    if cache.dtype != ckv.dtype or kpe.dtype != ckv.dtype or both != c + p:
        raise Unrecognized("its cache is quantized")
    rows = ("num_pages", "page_size", "head_dim_kv")
    axes = {"num_tokens": None, "num_pages": None, "page_size": page_size, "head_dim_ckv": c, "head_dim_kpe": p}
    inputs = {"ckv": of(ckv, "num_tokens", "head_dim_ckv"), "kpe": of(kpe, "num_tokens", "head_dim_kpe")}
    return Form(
        name=f"cache_update_mla{abbreviate(ckv.dtype, torch.bfloat16)}_ckv{c}_kpe{p}_ps{page_size}",
        op_type="cache_update",
        axes={**axes, "head_dim_kv": both},
        inputs={**inputs, "kv_cache": of(cache, *rows), "slot_mapping": slots},
        outputs={"kv_cache_out": made(cache.dtype, rows, lambda: call.tensor("kv_cache"))},
        reference=REFERENCE.format(ckv=c, kpe=p, ps=page_size, both=both),
        description="New latent keys and values are written to a paged cache.",
        touched=lambda: _used(slots.value) * 2 * both * cache.element_size() + size(slots.value),
    )


def _used(slots: torch.Tensor) -> int:
    """Tokens that are no padding."""
    return int(slots.numel() if slots.is_meta else (slots >= 0).sum())

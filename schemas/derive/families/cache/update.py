"""cache_update: new keys and values, or latents, written to their slots of a paged cache.

Operators of vLLM, SGLang and FlashInfer. A slot is page · page size + row; a negative one is padding, and nothing is
written for it. Newer SGLang takes the number of a slot that it skips. If two tokens have one slot, either may stay.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kcap.schemas.derive.cost import Cost, CostInputs, distinct_bytes
from kcap.schemas.derive.families import cost_function, family
from kcap.schemas.derive.families.attention.core import wrapper_kv_cache
from kcap.schemas.derive.families.cache.cpu_cache import unpacked_caches
from kcap.schemas.derive.invocation import Invocation, Unrecognized, require_values, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, lazy_arg, tensor_arg

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

CACHE_AXES = ("num_pages", "page_size", "num_kv_heads", "head_dim")
ROW_AXES = "Page · page size + row of each token's slot"
SLOTS_DESCRIPTION = f"{ROW_AXES}; nothing is written for a negative one."
Pair = tuple[torch.Tensor, torch.Tensor]


@family("cache_update", "_C::cpu_attn_reshape_and_cache")
def cpu_update(call: Invocation) -> KernelInstance:
    key, value = call.tensor("key_cache"), call.tensor("value_cache")
    return update_instance(call, lambda: unpacked_caches(key, value, str(call["isa"])), slots_of(call))


@family("cache_update", "_C_cache_ops::reshape_and_cache_flash")
def flash_update(call: Invocation) -> KernelInstance:
    return update_instance(call, lambda: (call.tensor("key_cache"), call.tensor("value_cache")), slots_of(call))


@family("cache_update", "_C_cache_ops::reshape_and_cache")
def split_update(call: Invocation) -> KernelInstance:
    """Keys are [pages, heads, dim / x, rows, x], values [pages, heads, dim, rows]."""

    def caches() -> Pair:
        key, value = call.tensor("key_cache"), call.tensor("value_cache")
        return key.permute(0, 3, 1, 2, 4).flatten(3), value.permute(0, 3, 1, 2)

    return update_instance(call, caches, slots_of(call))


@family("cache_update", "sglang::store_cache")
def sglang_update(call: Invocation) -> KernelInstance:
    """Rows of all heads together: pages of one row, and one head as wide as all."""

    def caches() -> Pair:
        k, v = (call.tensor(name).flatten(1) for name in ("k_cache", "v_cache"))
        return k[:, None, None, :], v[:, None, None, :]

    return update_instance(
        call, caches, tensor_arg(call.tensor("indices"), "num_tokens", description=SLOTS_DESCRIPTION)
    )


@family("cache_update", "flashinfer::append_paged_kv_cache")
def flashinfer_update(call: Invocation) -> KernelInstance:
    """A token's slot is the row of its position in the page that its sequence has there."""
    page_size = wrapper_kv_cache(call)[0].shape[1]

    def slots() -> torch.Tensor:
        names = ("kv_indptr", "kv_indices", "batch_indices", "positions")
        indptr, indices, batch, position = (require_values(call.tensor(name), name).long() for name in names)
        return indices[indptr[batch] + position // page_size] * page_size + position % page_size

    return update_instance(
        call,
        lambda: wrapper_kv_cache(call),
        lazy_arg("int64", ("num_tokens",), slots, SLOTS_DESCRIPTION),
    )


def slots_of(call: Invocation) -> TensorArg:
    return tensor_arg(call.tensor("slot_mapping"), "num_tokens", description=SLOTS_DESCRIPTION)


def update_instance(call: Invocation, caches: Callable[[], Pair], slots: TensorArg) -> KernelInstance:
    """`caches` gives both, [pages, rows of a page, heads, dim], as they are when it is called."""
    k_cache, v_cache = caches()
    page_size, heads, dim = k_cache.shape[1:]
    k, v = (new_rows(call, slots, *names) for names in (("key", "append_key", "k"), ("value", "append_value", "v")))
    k, v = (new.reshape(len(new), heads, dim) for new in (k, v))
    if {k.dtype, v.dtype, v_cache.dtype} != {k_cache.dtype} or v_cache.shape != k_cache.shape:
        raise Unrecognized("its caches are quantized, or of two shapes")
    skipped = skipped_slot(call, "reserved_skip_index")
    word = abbreviate(k.dtype, torch.bfloat16) + skip_word(skipped)
    new = ("num_tokens", "num_kv_heads", "head_dim")
    inputs = {
        "k": tensor_arg(k, *new),
        "v": tensor_arg(v, *new),
        "k_cache": tensor_arg(k_cache, *CACHE_AXES),
        "v_cache": tensor_arg(v_cache, *CACHE_AXES),
    }
    return KernelInstance(
        name=f"cache_update{word}_kv{heads}_d{dim}_ps{page_size}",
        op_type="cache_update",
        axes={"num_tokens": None, "num_pages": None, "page_size": page_size, "num_kv_heads": heads, "head_dim": dim},
        inputs={**inputs, "slot_mapping": slots},
        outputs={
            "k_cache_out": lazy_arg(k.dtype, CACHE_AXES, lambda: caches()[0]),
            "v_cache_out": lazy_arg(v.dtype, CACHE_AXES, lambda: caches()[1]),
        },
        reference=REFERENCE.format(ps=page_size, kv=heads, d=dim, written=written_tokens(skipped)),
        description="New keys and values are written to a paged cache.",
        touched=lambda: _touched(slots, k, skipped),
    )


def _touched(slots: TensorArg, k: torch.Tensor, skipped: int | None) -> int:
    """Bytes: of a token that is padding, neither key nor value is read."""
    indices: torch.Tensor = slots.get()
    return 4 * rows_written(used_slots(indices, skipped)) * total_bytes(k[:1]) + total_bytes(indices)


def skipped_slot(call: Invocation, *names: str) -> int | None:
    """The slot to which newer SGLang writes nothing, the first of `names` that is set; None if there is none."""
    skipped = next((call[name] for name in names if call[name] is not None), -1)
    if not isinstance(skipped, int) or skipped > 0:  # replay gives padding the first slot
        raise Unrecognized("the slot that it skips is not known, or not the first")
    return skipped if skipped >= 0 else None


def skip_word(skipped: int | None) -> str:
    return "" if skipped is None else f"_skip{skipped}"


def written_tokens(skipped: int | None) -> str:
    """Which tokens are written, in a reference."""
    return "slot_mapping >= 0" if skipped is None else f"slot_mapping != {skipped}"


def used_slots(slots: torch.Tensor, skipped: int | None) -> torch.Tensor:
    return slots if skipped is None or slots.is_meta else slots[slots != skipped]


def new_rows(call: Invocation, slots: TensorArg, *names: str) -> torch.Tensor:
    """The new tokens, of which vLLM passes more than there are slots where a graph is padded."""
    rows = call.tensor(*names)
    return rows[: len(slots.value)] if isinstance(slots.value, torch.Tensor) else rows


LATENT_REFERENCE = """import torch


@torch.no_grad()
def run(ckv, kpe, kv_cache, slot_mapping):
    assert ckv.shape[1:] == ({ckv},) and kpe.shape[1:] == ({kpe},)
    assert kv_cache.shape[1:] == ({ps}, {both})
    written = {written}
    kv_cache_out = kv_cache.clone(memory_format=torch.contiguous_format)
    kv_cache_out.flatten(0, 1)[slot_mapping[written].long()] = torch.cat((ckv, kpe), dim=1)[written]
    return kv_cache_out
"""


@family("cache_update", "_C_cache_ops::concat_and_cache_mla", "_C::concat_and_cache_mla_cpu")
def latent_update(call: Invocation) -> KernelInstance:
    """`kv_cache`: [pages, rows of a page, latent + rotated]."""
    return latent_instance(call, lambda: call.tensor("kv_cache"), (("kv_c", "kv_c_normed"), ("k_pe",)), slots_of(call))


@family("cache_update", "tvm::set_mla_kv_buffer")
def sglang_latent_update(call: Invocation) -> KernelInstance:
    """Arguments without names: the cache of rows, slots, latent and rotated parts, warps, and the slot that is skipped.

    0.5.15 skips none.
    """
    slots = tensor_arg(call.tensor("loc", "arg1"), "num_tokens", description=SLOTS_DESCRIPTION)
    if slots.value.dim() != 1 or call.tensor("kv_buffer", "arg0").dim() != 2:
        raise Unrecognized("its cache is of no rows")
    parts, skipped = (("k_nope", "arg2"), ("k_rope", "arg3")), skipped_slot(call, "reserved_skip_index", "arg5")
    return latent_instance(call, lambda: call.tensor("kv_buffer", "arg0")[:, None], parts, slots, skipped)


def latent_instance(
    call: Invocation,
    cache: Callable[[], torch.Tensor],
    parts: tuple[tuple[str, ...], ...],
    slots: TensorArg,
    skipped: int | None = None,
) -> KernelInstance:
    """`parts`: names of those of each token, [tokens, latent] and [tokens, rotated]; `cache` gives it as it then is."""
    rows, tokens = cache(), slots.value.shape[0]
    ckv, kpe = (call.tensor(*names)[:tokens] for names in parts)
    (page_size, width), (c, p) = rows.shape[1:], (ckv.shape[1], kpe.shape[1])
    if rows.dtype != ckv.dtype or kpe.dtype != ckv.dtype or width != c + p:
        raise Unrecognized("its cache is quantized, or wider than what is written")
    cells = ("num_pages", "page_size", "head_dim_kv")
    axes = {"num_tokens": None, "num_pages": None, "page_size": page_size, "head_dim_ckv": c, "head_dim_kpe": p}
    inputs = {
        "ckv": tensor_arg(ckv, "num_tokens", "head_dim_ckv"),
        "kpe": tensor_arg(kpe, "num_tokens", "head_dim_kpe"),
    }
    return KernelInstance(
        name=f"cache_update_mla{abbreviate(ckv.dtype, torch.bfloat16)}{skip_word(skipped)}_ckv{c}_kpe{p}_ps{page_size}",
        op_type="cache_update",
        axes={**axes, "head_dim_kv": width},
        inputs={**inputs, "kv_cache": tensor_arg(rows, *cells), "slot_mapping": slots},
        outputs={"kv_cache_out": lazy_arg(rows.dtype, cells, cache)},
        reference=LATENT_REFERENCE.format(ckv=c, kpe=p, ps=page_size, both=width, written=written_tokens(skipped)),
        description="New latent keys and values are written to a paged cache.",
        touched=lambda: (
            rows_written(used_slots(slots.value, skipped)) * 2 * width * rows.element_size() + total_bytes(slots.value)
        ),
    )


def rows_written(slots: torch.Tensor) -> int:
    """How many rows of a cache: none for padding, and one where several tokens, which pad a batch, share a slot."""
    return slots.numel() if slots.is_meta else len(slots[slots >= 0].unique())


ROWS_REFERENCE = """import torch


@torch.no_grad()
def run(new, cache, slot_mapping):
    assert cache.shape[1:] == (1, {kv}, {d})
    cache_out = cache.clone(memory_format=torch.contiguous_format)
    cache_out.flatten(0, 1)[slot_mapping.long()] = new
    return cache_out
"""


@family("cache_update", "aten::index_put_")
def rows_update(call: Invocation) -> KernelInstance:
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
    return KernelInstance(
        name=f"cache_update_rows{abbreviate(new.dtype, torch.bfloat16)}_kv{heads}_d{dim}_ps1",
        op_type="cache_update",
        axes=axes,
        inputs={
            "new": tensor_arg(new, "num_tokens", "num_kv_heads", "head_dim"),
            "cache": tensor_arg(cache[:, None], *CACHE_AXES),
            "slot_mapping": tensor_arg(slots, "num_tokens", description=f"{ROW_AXES}."),
        },
        outputs={"cache_out": lazy_arg(cache.dtype, CACHE_AXES, lambda: call.tensor("self")[:, None])},
        reference=ROWS_REFERENCE.format(kv=heads, d=dim),
        description="New keys, or new values, are written to a cache of rows.",
        touched=lambda: 2 * rows_written(slots) * total_bytes(new[:1]) + total_bytes(slots),
    )


@cost_function("cache_update")
def cache_update_cost(inputs: CostInputs) -> Cost:
    """The caches may be written in place."""
    slots, new = inputs.index("slot_mapping"), [name for name in ("k", "v", "ckv", "kpe", "new") if name in inputs]
    read = rows_written(slots) * sum(distinct_bytes(inputs[name][:1]) for name in new)
    return Cost(2 * read + inputs.read("slot_mapping"), read, 0, inputs.dtype)

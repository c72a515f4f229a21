"""cache_update: the reference against vLLM's CPU operators and plain loops, in every layout of a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, needs_avx512, randn
from paging import batch

from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function_for
from kcap.schemas.derive.kernel import KernelInstance

SIZES = [(1, 2, 64), (5, 1, 32), (33, 4, 64), (64, 8, 128), (90, 3, 96)]
PAGES, ROWS = 4, 32
Arguments = dict[str, Any]


def slots_for(tokens: int, seed: int = 0, padding: int = 2) -> torch.Tensor:
    """A slot for each token but the last ones, which are padding."""
    slots = torch.randperm(PAGES * ROWS, generator=torch.Generator().manual_seed(seed))[:tokens]
    slots[max(tokens - padding, 1) :] = -1
    return slots


def projected(tokens: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> Arguments:
    """Keys and values as views of one projection."""
    both = randn(tokens, 2, heads, dim, dtype=dtype, seed=seed)
    return {"key": both[:, 0], "value": both[:, 1], "slot_mapping": slots_for(tokens, seed)}


@pytest.mark.parametrize("isa", ["vec", "vec16", pytest.param("amx", marks=needs_avx512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reference_is_vllms_cpu_operator(isa: str, dtype: torch.dtype):
    """AMX's layout is written without AMX."""
    load_vllm_kernels()
    for seed, (tokens, heads, dim) in enumerate(SIZES):
        key_cache, value_cache = randn(PAGES, heads, 2 * ROWS, dim, dtype=dtype, seed=seed + 9).chunk(2, dim=2)
        call_arguments = {
            **projected(tokens, heads, dim, dtype, seed),
            "key_cache": key_cache,
            "value_cache": value_cache,
        }
        run = torch.ops._C.cpu_attn_reshape_and_cache
        kernel = agrees("_C::cpu_attn_reshape_and_cache", run, **call_arguments, isa=isa)
        assert kernel.name.endswith(f"_kv{heads}_d{dim}_ps{ROWS}")


@needs_avx512
def test_latent_reference_is_vllms_cpu_operator():
    load_vllm_kernels()
    run = torch.ops._C.concat_and_cache_mla_cpu
    for seed, (tokens, ckv, kpe) in enumerate([(1, 64, 16), (7, 512, 64), (33, 128, 32), (64, 96, 16), (100, 256, 64)]):
        kernel = agrees(
            "_C::concat_and_cache_mla_cpu",
            run,
            kv_c_normed=randn(tokens, ckv, seed=seed),
            k_pe=randn(tokens, kpe, seed=seed + 1),
            kv_cache=randn(PAGES, ROWS, ckv + kpe, seed=seed + 2),
            slot_mapping=slots_for(tokens, seed),
        )
        assert kernel.name == f"cache_update_mla_ckv{ckv}_kpe{kpe}_ps{ROWS}"


def written(cache: torch.Tensor, new: torch.Tensor, slots: list[int]) -> None:
    """`cache`: a view [pages, rows of a page, …] of what is written."""
    for token, slot in enumerate(slots):
        if slot >= 0:
            cache[slot // cache.shape[1], slot % cache.shape[1]] = new[token]


def vllm_flash(**call_arguments: Any) -> None:
    slots = call_arguments["slot_mapping"].tolist()
    written(call_arguments["key_cache"], call_arguments["key"], slots)
    written(call_arguments["value_cache"], call_arguments["value"], slots)


def flash(tokens: int, heads: int, dim: int, seed: int = 0) -> Arguments:
    """Caches interleaved in one allocation, and more keys than slots, as vLLM pads a graph's batch."""
    key_cache, value_cache = randn(PAGES, 2, ROWS, heads, dim, seed=seed + 5).unbind(1)
    call_arguments = projected(tokens + 3, heads, dim, torch.bfloat16, seed)
    return {
        **call_arguments,
        "slot_mapping": call_arguments["slot_mapping"][:tokens],
        "key_cache": key_cache,
        "value_cache": value_cache,
        "kv_cache_dtype": "auto",
        "k_scale": torch.ones(()),
        "v_scale": torch.ones(()),
    }


def test_caches_of_flash_attention():
    for seed, sizes in enumerate(SIZES):
        kernel = agrees("_C_cache_ops::reshape_and_cache_flash", vllm_flash, **flash(*sizes, seed))
    assert kernel.touched() == 90 * (4 * 3 * 96 * 2 + 8)


def test_caches_whose_keys_are_split():
    call_arguments = projected(9, 2, 64, torch.bfloat16)

    def run(**call_arguments: Any) -> None:
        for token, slot in enumerate(call_arguments["slot_mapping"].tolist()):
            page, row = divmod(slot, ROWS)
            if slot >= 0:
                call_arguments["key_cache"][page, :, :, row, :] = call_arguments["key"][token].unflatten(1, (8, 8))
                call_arguments["value_cache"][page, :, :, row] = call_arguments["value"][token]

    caches = {"key_cache": randn(PAGES, 2, 8, ROWS, 8), "value_cache": randn(PAGES, 2, 64, ROWS)}
    agrees("_C_cache_ops::reshape_and_cache", run, **call_arguments, **caches)


@pytest.mark.parametrize("skipped", [None, -1, 0])
def test_sglangs_operator(skipped: int | None):
    def run(**call_arguments: Any) -> None:
        slots = [-1 if slot == skipped else slot for slot in call_arguments["indices"].tolist()]
        written(call_arguments["k_cache"][:, None], call_arguments["k"], slots)
        written(call_arguments["v_cache"][:, None], call_arguments["v"], slots)

    more = {} if skipped is None else {"reserved_skip_index": skipped}
    names = {"k": (4, 128), "v": (4, 128), "k_cache": (50, 128), "v_cache": (50, 128)}
    tensors = {name: randn(*shape, seed=n) for n, (name, shape) in enumerate(names.items())}
    kernel = agrees("sglang::store_cache", run, **tensors, indices=torch.tensor([7, 0, 49, 3]), **more)
    assert kernel.name == f"cache_update{'_skip0' if skipped == 0 else ''}_kv1_d128_ps1"


LATENT = "tvm::set_mla_kv_buffer"


def unnamed(slots: list[int], *more: Any) -> Arguments:
    """Of SGLang's function, whose rotated part is cut out of a projection: nothing names its arguments."""
    values = (randn(50, 96, seed=1), torch.tensor(slots), randn(len(slots), 64, seed=2), randn(len(slots), 80)[:, 48:])
    return {f"arg{place}": value for place, value in enumerate((*values, *more))}


@pytest.mark.parametrize(("more", "rows"), [((4,), 4), ((8, -1), 4), ((8, 0), 3)])
def test_sglangs_latent_cache(more: tuple[int, ...], rows: int) -> None:
    """As its source in CUDA has it: newer releases skip a slot."""

    def run(**call: Any) -> None:
        slots = [-1 if slot in more[1:] else slot for slot in call["arg1"].tolist()]
        written(call["arg0"][:, None], torch.cat((call["arg2"], call["arg3"]), dim=1), slots)

    assert declined(LATENT, **unnamed([7, 0, 49, 3], 8, 5)), "in a replay the first slot is of padding"
    kernel = agrees(LATENT, run, **unnamed([7, 0, 49, 3], *more))
    assert kernel.name == f"cache_update_mla{'_skip0' if rows == 3 else ''}_ckv64_kpe32_ps1"
    assert kernel.touched is not None and kernel.touched() == rows * 2 * 96 * 2 + 4 * 8
    names = ("kv_buffer", "loc", "k_nope", "k_rope", "num_warps", "reserved_skip_index")
    named = dict(zip(names, unnamed([7, 0, 49, 3], *more).values(), strict=False))
    assert kernel_of(LATENT, **named).key == kernel.key, "replay names the arguments"


def test_latent_caches_of_another_kind_are_declined() -> None:
    call = unnamed([7, 0, 49, 3], 4)
    wider, quantized = randn(50, 128), call["arg0"].to(torch.float8_e4m3fn)
    for other in ({"arg0": wider}, {"arg0": quantized}, {"arg3": call["arg3"].float()}, {"arg5": "drifts"}):
        assert declined(LATENT, **call | other), other


@pytest.mark.parametrize(("slots", "rows"), [([7, 9, 49, 3], 4), ([7, 0, 0, 0], 2)])
def test_slots_that_several_tokens_share_are_written_once(slots: list[int], rows: int):
    """As by the padding of a graph's batch."""
    names = {"k": (4, 128), "v": (4, 128), "k_cache": (50, 128), "v_cache": (50, 128)}
    tensors = {name: randn(*shape, seed=n) for n, (name, shape) in enumerate(names.items())}
    kernel = kernel_of("sglang::store_cache", **tensors, indices=torch.tensor(slots))
    function, inputs = cost_function_for("cache_update"), {name: arg.get() for name, arg in kernel.inputs.items()}
    assert kernel.touched is not None and function is not None
    assert kernel.touched() == function(CostInputs(checked(kernel), inputs)).bytes == rows * 4 * 128 * 2 + 4 * 8


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_flashinfers_operator(layout: str):
    requests = batch([3, 1, 9], [20, 33, 9], 16)
    counts = [-(-n // 16) for n in requests.lengths]
    where = [
        (row, length - n + i)
        for row, (n, length) in enumerate(zip(requests.queries, requests.lengths, strict=True))
        for i in range(n)
    ]
    cache = randn(requests.pages, 2, 16, 2, 64)

    def run(**call_arguments: Any) -> None:
        both = call_arguments["paged_kv_cache"] if layout == "NHD" else call_arguments["paged_kv_cache"].transpose(2, 3)
        for token, (row, position) in enumerate(where):
            cells = both[requests.table[row, position // 16], :, position % 16]
            cells.copy_(torch.stack((call_arguments["append_key"][token], call_arguments["append_value"][token])))

    agrees(
        "flashinfer::append_paged_kv_cache",
        run,
        append_key=randn(13, 2, 64, seed=1),
        append_value=randn(13, 2, 64, seed=2),
        batch_indices=torch.tensor([row for row, _ in where], dtype=torch.int32),
        positions=torch.tensor([position for _, position in where], dtype=torch.int32),
        paged_kv_cache=cache if layout == "NHD" else cache.transpose(2, 3).contiguous(),
        kv_indices=torch.cat([requests.table[row, :count] for row, count in enumerate(counts)]),
        kv_indptr=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        kv_last_page_len=torch.tensor([4, 1, 9], dtype=torch.int32),
        kv_layout=layout,
    )


def llama(**more: Any) -> KernelInstance:
    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    caches = {"key_cache": meta(57056, 16, 8, 128), "value_cache": meta(57056, 16, 8, 128)}
    new = {"key": meta(16, 8, 128), "value": meta(16, 8, 128), "slot_mapping": meta(16, dtype=torch.int64)}
    return kernel_of("_C_cache_ops::reshape_and_cache_flash", **{**new, **caches, **more})


def test_names_of_llama():
    definition = checked(llama())
    assert definition.name == "cache_update_kv8_d128_ps16" and definition.op_type == "cache_update"
    assert list(definition.inputs) == ["k", "v", "k_cache", "v_cache", "slot_mapping"]
    assert list(definition.outputs) == ["k_cache_out", "v_cache_out"]
    assert definition.const_axes == {"page_size": 16, "num_kv_heads": 8, "head_dim": 128}
    assert definition.var_axes == ["num_tokens", "num_pages"]


def test_quantized_caches_are_declined():
    call_arguments = flash(5, 2, 64)
    caches = {name: call_arguments[name].to(torch.float8_e4m3fn) for name in ("key_cache", "value_cache")}
    assert declined("_C_cache_ops::reshape_and_cache_flash", **{**call_arguments, **caches})


def rows_of(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    """Keys of SGLang's cache, as PyTorch's operator writes them."""
    slots = torch.tensor([7, 0, 49, 3])
    return {
        "self": randn(50, 2, 64, dtype=dtype),
        "indices": [slots],
        "values": randn(4, 2, 64, dtype=dtype, seed=1),
        "accumulate": False,
        **more,
    }


def written_rows(**call_arguments: Any) -> torch.Tensor:
    return torch.ops.aten.index_put_.default(
        *(call_arguments[name] for name in ("self", "indices", "values", "accumulate"))
    )


def test_rows_of_a_cache_are_written_by_atens_operator():
    for dtype in (torch.bfloat16, torch.float32):
        kernel = agrees("aten::index_put_", written_rows, **rows_of(dtype))
        assert (kernel.family, checked(kernel).op_type) == ("cache_update", "cache_update")
        assert kernel.touched is not None and kernel.touched() == 2 * 4 * 2 * 64 * dtype.itemsize + 4 * 8
    strided = randn(4, 6, 64, seed=3)[:, 4:]
    kernel = agrees("aten::index_put_", written_rows, **rows_of(values=strided))
    assert kernel.name == "cache_update_rows_kv2_d64_ps1"


def test_what_writes_no_whole_rows_is_no_cache_update():
    slots = torch.tensor([7, 0, 49, 3])
    for more in (
        {"accumulate": True},
        {"indices": [slots, slots]},
        {"indices": [None, slots]},
        {"indices": [torch.zeros(50, dtype=torch.bool)]},
        {"indices": [slots.reshape(2, 2)]},
        {"values": randn(64)},
        {"values": randn(4, 2, 64).float()},
        {"self": randn(50, 64), "values": randn(4, 64)},
    ):
        assert declined("aten::index_put_", **rows_of(**more)), more

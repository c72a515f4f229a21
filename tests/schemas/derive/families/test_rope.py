"""rope: the reference against vLLM's CPU operator and a complex rotation, strides, names, what is declined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, randn

ROTARY = "_C::rotary_embedding"
SIZES = [(1, 4, 2, 64), (7, 8, 1, 128), (33, 2, 2, 96), (64, 32, 8, 128), (130, 3, 3, 64)]
Arguments = dict[str, Any]


def arguments(tokens: int, heads: int, kv: int, size: int, rot: int, dtype: torch.dtype, seed: int = 0) -> Arguments:
    """Query and key are views of one projection, as vLLM passes them."""
    both = randn(tokens, (heads + 2 * kv) * size, dtype=dtype, seed=seed)
    query, key, _ = both.split([heads * size, kv * size, kv * size], dim=1)
    angle = randn(200, rot // 2, dtype=torch.float32, seed=seed + 1) * 3
    return {
        "positions": torch.randint(0, 200, (tokens,), generator=torch.Generator().manual_seed(seed)),
        "query": query,
        "key": key,
        "head_size": size,
        "cos_sin_cache": torch.cat((angle.cos(), angle.sin()), dim=1).to(dtype),
        "is_neox": True,
    }


def rotated(x: torch.Tensor, call_arguments: Arguments) -> torch.Tensor:
    """An independent rotation, by complex numbers: [tokens, heads, head size]."""
    rot = call_arguments["cos_sin_cache"].shape[1]
    cos, sin = call_arguments["cos_sin_cache"][call_arguments["positions"].flatten()].double().chunk(2, dim=1)
    head = x[..., :rot].double().unflatten(-1, (2, -1) if call_arguments["is_neox"] else (-1, 2))
    pairs = head.movedim(-2, -1) if call_arguments["is_neox"] else head
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)[:, None])
    flat = (turned.movedim(-1, -2) if call_arguments["is_neox"] else turned).flatten(-2)
    return torch.cat((flat.to(x.dtype), x[..., rot:]), dim=-1)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reference_is_vllms_cpu_operator(dtype: torch.dtype, is_neox: bool):
    load_vllm_kernels()
    for seed, (tokens, heads, kv, size) in enumerate(SIZES):
        for rot in (size, size // 2):
            call_arguments = arguments(tokens, heads, kv, size, rot, dtype, seed)
            kernel = agrees(ROTARY, torch.ops._C.rotary_embedding, **{**call_arguments, "is_neox": is_neox})
            assert f"{'neox' if is_neox else 'gptj'}_style" in kernel.name


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    "operator",
    [
        "sgl_kernel::rotary_embedding",
        "sgl_kernel::rotary_embedding_cpu",
        "flashinfer::apply_rope_with_cos_sin_cache",
    ],
)
def test_operators_in_place_and_not(operator: str, is_neox: bool):
    def run(**call_arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        heads = [call_arguments[name].unflatten(1, (-1, 64)) for name in ("query", "key")]
        q, k = (rotated(x, call_arguments) for x in heads)
        if operator == "sgl_kernel::rotary_embedding":
            heads[0].copy_(q)
            heads[1].copy_(k)
        return q.flatten(1), k.flatten(1)

    call_arguments = {**arguments(9, 4, 2, 64, 32, torch.bfloat16), "is_neox": is_neox}
    kernel = agrees(operator, run, **{**call_arguments, "cos_sin_cache": call_arguments["cos_sin_cache"].float()})
    assert kernel.name == f"rope_with_cos_sin_cache_{'neox' if is_neox else 'gptj'}_style_d64_rd32"


@pytest.mark.parametrize("is_neox", [True, False])
def test_sglangs_operator_rotates_part_of_wider_heads(is_neox: bool):
    call_arguments = arguments(9, 4, 2, 64, 32, torch.bfloat16)
    heads = {"q": call_arguments["query"].unflatten(1, (-1, 64)), "k": call_arguments["key"].unflatten(1, (-1, 64))}
    views = {name: x[..., 32:] for name, x in heads.items()}

    def run(q: torch.Tensor, k: torch.Tensor, **more: Any) -> None:
        for x in (q, k):
            x.copy_(rotated(x, more))

    kernel = agrees(
        "sglang::apply_rope_inplace",
        run,
        **views,
        cos_sin_cache=call_arguments["cos_sin_cache"],
        positions=call_arguments["positions"].int(),
        is_neox=is_neox,
        rope_dim=0,
    )
    assert kernel.inputs["positions"].dtype == "int32"


@pytest.mark.parametrize("is_neox", [True, False])
def test_sglangs_operator_that_stores_keys_and_values_too(is_neox: bool):
    call_arguments = arguments(9, 4, 2, 64, 64, torch.bfloat16)
    slots = torch.tensor([7, 0, 49, 3, 11, 12, 13, 14, 40])
    caches = {name: randn(50, 128, seed=n) for n, name in enumerate(("k_cache", "v_cache"))}

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor, **more: Any) -> None:
        for x in (q, k):
            x.copy_(rotated(x, more))
        for token, slot in enumerate(out_loc.tolist()):
            more["k_cache"][slot] = k[token].flatten()
            more["v_cache"][slot] = v[token].flatten()

    tensors = {
        "q": call_arguments["query"].unflatten(1, (-1, 64)),
        "k": call_arguments["key"].unflatten(1, (-1, 64)),
        "v": randn(9, 128, seed=5),
        "positions": call_arguments["positions"],
        "cos_sin_cache": call_arguments["cos_sin_cache"].float(),
    }
    scalars = {"is_neox": is_neox, "rope_dim": 0}
    operator = "sglang::apply_rope_inplace_with_kvcache"
    kernel = agrees(operator, run, **tensors, **caches, **scalars, out_loc=slots)
    assert kernel.name == f"rope_store_with_cos_sin_cache_{'neox' if is_neox else 'gptj'}_style_d64_rd64"
    assert list(kernel.outputs) == ["q_out", "k_out", "k_cache_out", "v_cache_out"] and kernel.touched is not None
    rows = len(call_arguments["positions"].unique())
    assert kernel.touched() == 9 * (2 * 6 * 128 + 8) + rows * 64 * 4 + 9 * (3 * 2 * 128 + 8)
    quantized = {name: cache.to(torch.float8_e4m3fn) for name, cache in caches.items()}
    assert declined(operator, **tensors, **quantized, **scalars, out_loc=slots)


def test_a_query_alone():
    def run(**call_arguments: Any) -> None:
        query = call_arguments["query"].unflatten(1, (-1, 64))
        query.copy_(rotated(query, call_arguments))

    kernel = agrees(ROTARY, run, **{**arguments(9, 4, 2, 64, 64, torch.bfloat16), "key": None})
    assert list(kernel.outputs) == ["q_out"] and "_q_" in kernel.name


def test_names_of_llama_are_flashinfers():
    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    call_arguments = {
        "positions": meta(256, dtype=torch.int64),
        "query": meta(256, 4096),
        "key": meta(256, 1024),
        "head_size": 128,
        "cos_sin_cache": meta(131072, 128, dtype=torch.float32),
        "is_neox": True,
        "rope_dim_offset": 0,
        "inverse": False,
    }
    kernel = kernel_of(ROTARY, **call_arguments)
    definition = checked(kernel)
    assert definition.name == "rope_with_cos_sin_cache_neox_style_d128_rd128" and definition.op_type == "rope"
    assert list(definition.inputs) == ["q", "k", "cos_sin_cache", "positions", "is_neox"]
    assert list(definition.outputs) == ["q_out", "k_out"]
    assert definition.const_axes == {"head_size": 128, "rotary_dim": 128}
    assert definition.var_axes == ["num_tokens", "num_qo_heads", "num_kv_heads", "max_seq_len"]
    assert kernel.touched() == 256 * (2 * 40 * 128 * 2 + 8) + 128 * 4  # positions may all be one
    assert kernel_of(ROTARY, **{**call_arguments, "cos_sin_cache": meta(131072, 128)}).name.endswith(
        "_style_bf16cache_d128_rd128"
    )
    assert declined(ROTARY, **{**call_arguments, "inverse": True})
    assert declined(ROTARY, **{**call_arguments, "rope_dim_offset": 64})
    assert declined(ROTARY, **{**call_arguments, "positions": meta(3, 256, dtype=torch.int64)})

"""The attention families' references against the real operators of vLLM's CUDA build and of FlashInfer, on a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agrees, randn
from paging import Batch, batch, starts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")]
HEADS, KV_HEADS, DIM, ROWS = 32, 8, 128, 16
BATCHES = [([1], [1]), ([1, 1, 1], [40, 128, 129]), ([64], [64]), ([3, 1, 70], [300, 33, 70]), ([600, 2], [640, 2])]
Arguments = dict[str, Any]


def moved(arguments: Arguments) -> Arguments:
    return {name: v.cuda() if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}


def library(name: str) -> None:
    try:
        importlib.import_module(name)
    except (ImportError, OSError) as error:
        pytest.skip(f"{name} is not here: {error}")


def positional(operator: Any) -> Callable[..., Any]:
    """`operator` called with all arguments of its schema, by position; those not given are None or their default."""

    def run(**call_arguments: Any) -> Any:
        arguments = operator.default._schema.arguments
        return operator(*(call_arguments.get(a.name, a.default_value) for a in arguments))

    return run


def paged(requests: Batch, seed: int, window: int = -1, **more: Any) -> Arguments:
    shape = (requests.pages, 2, ROWS, KV_HEADS, DIM)
    key_cache, value_cache = randn(*shape, seed=seed).unbind(1)
    q = randn(requests.tokens, HEADS, DIM, seed=seed + 1)
    call_arguments = {
        "q": q,
        "k": key_cache,
        "v": value_cache,
        "out": torch.empty_like(q),
        "cu_seqlens_q": requests.starts,
    }
    lengths = {
        "seqused_k": requests.seq_lens,
        "max_seqlen_q": max(requests.queries),
        "max_seqlen_k": max(requests.lengths),
    }
    flags = {"softmax_scale": 0.09, "is_causal": True, "softcap": 0.0}
    sides = {"window_size_left": window, "window_size_right": -1 if window < 0 else 0}
    return moved({**call_arguments, **lengths, **flags, **sides, **more})


FA3 = {"is_rotary_interleaved": True, "num_splits": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}
FA2 = {"p_dropout": 0.0, "zero_tensors": False, "return_softmax": False, "num_splits": 0}


@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize("version", [2, 3])
def test_flash_attention(version: int, window: int):
    library(f"vllm.vllm_flash_attn._vllm_fa{version}_C")
    name, operator = ("varlen_fwd", "_vllm_fa2_C::varlen_fwd") if version == 2 else ("fwd", "_vllm_fa3_C::fwd")
    run = positional(getattr(getattr(torch.ops, f"_vllm_fa{version}_C"), name))
    for seed, (queries, lengths) in enumerate(BATCHES):
        requests = batch(queries, lengths, ROWS, seed)
        table = {"page_table": requests.table} if version == 3 else {"block_table": requests.table}
        extra = FA3 if version == 3 else {**FA2, "cu_seqlens_k": torch.zeros_like(requests.starts)}
        kernel = agrees(operator, run, **paged(requests, seed, window, **table, **extra))
        assert list(kernel.outputs) == ["output", "lse"]


def test_padding_of_a_graphs_decode():
    library("vllm.vllm_flash_attn._vllm_fa3_C")
    requests = batch([1, 1], [20, 5], ROWS)
    q = randn(4, HEADS, DIM, seed=4)
    padded = {
        "q": q,
        "out": torch.full_like(q, 7.0),
        "cu_seqlens_q": torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32),
        "seqused_k": torch.tensor([20, 5, 0, 0], dtype=torch.int32),
        "page_table": torch.cat([requests.table, requests.table]),
    }
    run = positional(torch.ops._vllm_fa3_C.fwd)
    agrees("_vllm_fa3_C::fwd", run, **{**paged(requests, 0, **FA3), **moved(padded)})


def test_flash_attention_without_a_page_table():
    library("vllm.vllm_flash_attn._vllm_fa3_C")
    for seed, (queries, lengths) in enumerate(BATCHES):
        call_arguments = paged(batch(queries, lengths, ROWS, seed), seed, **FA3)
        keys = {n: randn(sum(lengths), KV_HEADS, DIM, seed=seed + i) for i, n in enumerate("kv", 2)}
        ragged_arguments = {**call_arguments, **moved({**keys, "cu_seqlens_k": starts(lengths)}), "seqused_k": None}
        assert (
            agrees("_vllm_fa3_C::fwd", positional(torch.ops._vllm_fa3_C.fwd), **ragged_arguments).family == "gqa_ragged"
        )


@pytest.mark.parametrize("window", [-1, 20])
def test_sinks_and_soft_capping(window: int):
    """gpt-oss and Gemma 2, in decodes, prefills and both together."""
    library("vllm.vllm_flash_attn._vllm_fa3_C")
    run = positional(torch.ops._vllm_fa3_C.fwd)
    for seed, (queries, lengths) in enumerate([*BATCHES, ([1, 1, 64], [40, 90, 64])]):
        requests = batch(queries, lengths, ROWS, seed)
        for more in ({"s_aux": randn(HEADS, seed=seed)}, {"softcap": 30.0}):
            call_arguments = paged(requests, seed, window, page_table=requests.table, **FA3)
            kernel = agrees("_vllm_fa3_C::fwd", run, **{**call_arguments, **moved(more)})
            assert ("sinks" in kernel.inputs) == ("s_aux" in more)


@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_attention_of_an_encoder(dim: int, window: int):
    library("vllm.vllm_flash_attn._vllm_fa3_C")
    lengths = [7, 300, 1, 64]
    tensors = {name: randn(sum(lengths), HEADS, dim, seed=seed) for seed, name in enumerate("qkv")}
    sides = {"window_size_left": window, "window_size_right": window, "softcap": 0.0, "is_causal": False}
    bounds = {
        "cu_seqlens_q": starts(lengths),
        "cu_seqlens_k": starts(lengths),
        "max_seqlen_q": 300,
        "max_seqlen_k": 300,
    }
    run = positional(torch.ops._vllm_fa3_C.fwd)
    agrees("_vllm_fa3_C::fwd", run, **moved({**tensors, **bounds, **sides, **FA3, "softmax_scale": dim**-0.5}))


def test_prefill_of_latent_attention():
    """A prompt's own keys, then a chunk of what is cached, of which a sequence may have none."""
    library("vllm.vllm_flash_attn._vllm_fa3_C")
    for queries, keys, causal in [([5, 200], [5, 200], True), ([5, 200, 3], [64, 300, 0], False)]:
        q = randn(sum(queries), 16, 192, seed=1)
        tensors = {"q": q, "k": randn(sum(keys), 16, 192, seed=2), "v": randn(sum(keys), 16, 128, seed=3)}
        bounds = {"cu_seqlens_q": starts(queries), "cu_seqlens_k": starts(keys)}
        bounds |= {"max_seqlen_q": max(queries), "max_seqlen_k": max(keys)}
        sides = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "softmax_scale": 0.07}
        run = positional(torch.ops._vllm_fa3_C.fwd)
        agrees("_vllm_fa3_C::fwd", run, **moved({**tensors, **bounds, **sides, **FA3, "is_causal": causal}))


def test_flash_attention_over_latents():
    library("vllm.vllm_flash_attn._vllm_fa3_C")
    for seed, (queries, lengths) in enumerate(
        [([1, 1, 1], [40, 128, 129]), ([2, 2], [64, 65]), ([1, 1, 70], [20, 9, 90])]
    ):
        requests = batch(queries, lengths, 64, seed)
        cache = randn(requests.pages, 64, 576, seed=seed)
        latents = {"k": cache[..., None, 512:], "v": cache[..., None, :512], "page_table": requests.table, "out": None}
        parts = {"q": randn(requests.tokens, 16, 64, seed=1), "q_v": randn(requests.tokens, 16, 512, seed=2)}
        call_arguments = {**paged(requests, seed, **FA3), **moved({**latents, **parts})}
        kernel = agrees("_vllm_fa3_C::fwd", positional(torch.ops._vllm_fa3_C.fwd), **call_arguments)
        assert kernel.family == "mla_paged"


def test_parts_of_latent_attention():
    library("vllm._custom_ops")
    requests = batch([40, 3, 17], [56, 35, 17], ROWS)
    gathered = {
        "src_cache": randn(requests.pages, ROWS, 576),
        "dst": randn(requests.tokens + 9, 576, seed=1),
        "block_table": requests.table,
        "cu_seq_lens": requests.starts,
        "token_to_seq": torch.arange(3, dtype=torch.int32).repeat_interleave(torch.tensor([40, 3, 17])),
        "num_tokens": requests.tokens,
        "kv_cache_dtype": "auto",
        "scale": torch.ones(1),
        "seq_starts": torch.tensor([16, 32, 0], dtype=torch.int32),
    }
    operator = "_C_cache_ops::gather_and_maybe_dequant_cache"
    agrees(operator, positional(torch.ops._C_cache_ops.gather_and_maybe_dequant_cache), **moved(gathered))
    parts = {"ql_nope": randn(7, 128, 512), "q_pe": randn(7, 128, 64, seed=1), "q_out": randn(7, 128, 576, seed=2)}
    agrees("_C_cache_ops::concat_mla_q", positional(torch.ops._C_cache_ops.concat_mla_q), **moved(parts))
    for merged in (None, 11):
        halves = {"output": randn(33, 16, 128), "output_lse": torch.zeros(16, 33)}
        for seed, name in enumerate(("prefix", "suffix")):
            halves[f"{name}_output"] = randn(33, 16, 128, seed=seed)
            halves[f"{name}_lse"] = randn(16, 33, dtype=torch.float32, seed=seed)
        more = {"prefill_tokens_with_context": merged}
        agrees("_C::merge_attn_states", positional(torch.ops._C.merge_attn_states), **moved(halves), **more)


def test_cache_update():
    library("vllm._custom_ops")
    for seed, tokens in enumerate([1, 7, 33, 64, 100]):
        key_cache, value_cache = randn(8, 2, ROWS, KV_HEADS, DIM, seed=seed).unbind(1)
        slots = torch.randperm(8 * ROWS, generator=torch.Generator().manual_seed(seed))[:tokens]
        slots[tokens // 2] = -1
        call_arguments = {"key": randn(tokens + 2, KV_HEADS, DIM), "value": randn(tokens + 2, KV_HEADS, DIM, seed=9)}
        caches = {"key_cache": key_cache, "value_cache": value_cache, "slot_mapping": slots}
        scales = {"kv_cache_dtype": "auto", "k_scale": torch.ones(()), "v_scale": torch.ones(())}
        run = positional(torch.ops._C_cache_ops.reshape_and_cache_flash)
        agrees("_C_cache_ops::reshape_and_cache_flash", run, **moved({**call_arguments, **caches, **scales}))


@pytest.mark.parametrize("is_neox", [True, False])
def test_rope(is_neox: bool):
    library("vllm._custom_ops")
    for seed, tokens in enumerate([1, 7, 33, 64, 100]):
        both = randn(tokens, 48 * DIM, seed=seed)
        query, key = both[:, : 32 * DIM], both[:, 32 * DIM : 40 * DIM]
        angle = randn(200, DIM // 2, dtype=torch.float32, seed=seed)
        table = torch.cat((angle.cos(), angle.sin()), dim=1).bfloat16()
        positions = torch.randint(0, 200, (tokens,), generator=torch.Generator().manual_seed(seed))
        call_arguments = {"positions": positions, "query": query, "key": key, "head_size": DIM, "cos_sin_cache": table}
        run = positional(torch.ops._C.rotary_embedding)
        agrees("_C::rotary_embedding", run, **moved(call_arguments), is_neox=is_neox)


def test_flash_mla():
    library("vllm._flashmla_C")
    operator = torch.ops._flashmla_C.dense_decode_fwd
    for seed, lengths in enumerate([[1], [33, 5], [128, 31, 64, 1], [200, 7, 90], [64, 64, 300]]):
        requests = batch([1] * len(lengths), lengths, 64, seed)
        q, cache = randn(requests.tokens, 1, 128, 576, seed=seed), randn(requests.pages, 64, 1, 576, seed=seed + 1)
        call_arguments = (q, cache, 512, requests.seq_lens, requests.table, 192**-0.5, False)
        names = [argument.name for argument in operator.default._schema.arguments]
        agrees(
            "_flashmla_C::dense_decode_fwd",
            positional(operator),
            **moved(dict(zip(names, call_arguments, strict=False))),
        )


def test_flash_mla_of_several_queries_a_sequence():
    library("vllm._flashmla_C")
    operator = torch.ops._flashmla_C.dense_decode_fwd
    names = [argument.name for argument in operator.default._schema.arguments]
    for seed, lengths in enumerate([[3], [33, 5], [128, 31, 64, 3]]):
        requests = batch([3] * len(lengths), lengths, 64, seed)
        q = randn(len(lengths), 3, 16, 576, seed=seed)
        cache = randn(requests.pages, 64, 1, 576, seed=seed + 1)
        call_arguments = (q, cache, 512, requests.seq_lens, requests.table, 192**-0.5, True)
        named = moved(dict(zip(names, call_arguments, strict=False)))
        assert "qo_indptr" in agrees("_flashmla_C::dense_decode_fwd", positional(operator), **named).inputs


@pytest.mark.parametrize("kind", ["Decode", "Prefill"])
def test_flashinfers_wrapper(kind: str):
    flashinfer = pytest.importorskip("flashinfer")
    decode = kind == "Decode"
    for seed, (queries, lengths) in enumerate(BATCHES):
        requests = batch([1] * len(lengths) if decode else queries, lengths, ROWS, seed)
        counts = [-(-n // ROWS) for n in lengths]
        pages = torch.cat([requests.table[row, :count] for row, count in enumerate(counts)]).cuda()
        last = torch.tensor([(n - 1) % ROWS + 1 for n in lengths], dtype=torch.int32)
        indptr = starts(counts)
        wrapper_object = getattr(flashinfer, f"Batch{kind}WithPagedKVCacheWrapper")(
            torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "NHD"
        )
        heads = (HEADS, KV_HEADS, DIM, ROWS)
        if decode:
            names: tuple[str, ...] = ("indptr", "indices", "last_page_len")
            wrapper_object.plan(indptr, pages, last, *heads, q_data_type=torch.bfloat16)
        else:
            names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
            planned = (requests.starts.cuda(), indptr.cuda(), pages, last.cuda())
            wrapper_object.plan(*planned, *heads, causal=True, q_data_type=torch.bfloat16)
        plan = dict(zip((f"plan.{n}" for n in names), (indptr, pages, last), strict=True))
        call_arguments = {
            "q": randn(requests.tokens, HEADS, DIM),
            "paged_kv_cache": randn(requests.pages, 2, ROWS, KV_HEADS, DIM),
        }
        options = {"return_lse": True, "plan.qo_indptr": requests.starts, "plan.causal": True, "init.kv_layout": "NHD"}

        def run(wrapper: Any = wrapper_object, **call_arguments: Any) -> Any:
            return wrapper.run(call_arguments["q"], call_arguments["paged_kv_cache"], return_lse=True)

        agrees(
            f"flashinfer::Batch{kind}WithPagedKVCacheWrapper.run", run, **moved({**call_arguments, **plan, **options})
        )

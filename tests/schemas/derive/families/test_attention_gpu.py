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

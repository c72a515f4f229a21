"""mla_paged: the reference against vLLM's CPU operator and PyTorch's attention, names, what is declined."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, randn
from paging import Batch, attention, batch, starts, tokens_of

HEADS, CKV, KPE = 16, 512, 64
DECODES = [[1], [33, 5], [128, 31, 64, 1], [200, 7, 90], [16, 16, 300]]
FLASHINFER = "flashinfer::BatchMLAPagedAttentionWrapper.run"
Arguments = dict[str, Any]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reference_is_vllms_cpu_operator(dtype: torch.dtype):
    load_vllm_kernels()
    for seed, lengths in enumerate(DECODES):
        requests = batch([1] * len(lengths), lengths, 16, seed)
        kernel = agrees(
            "_C::mla_decode_kvcache",
            torch.ops._C.mla_decode_kvcache,
            out=torch.empty(requests.tokens, HEADS, CKV, dtype=dtype),
            query=randn(requests.tokens, HEADS, CKV + KPE, dtype=dtype, seed=seed),
            kv_cache=randn(requests.pages, 16, CKV + KPE, dtype=dtype, seed=seed + 1),
            scale=192**-0.5,
            block_tables=requests.table,
            seq_lens=requests.seq_lens,
        )
        assert kernel.name.startswith("mla_paged_decode_nolse")


def latent_attention(requests: Batch, scale: float) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """An independent latent attention: [tokens, heads, 576] over [pages, rows, 576], and a natural log-sum-exp."""

    def run(q: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = []
        for row, n in enumerate(requests.queries):
            keys = tokens_of(cache, requests, row)[:, None]
            rows = q[int(requests.starts[row]) :][:n]
            parts.append(attention(rows, keys, keys[..., :CKV], scale, causal=True))
        return torch.cat([out for out, _ in parts]), torch.cat([lse.T for _, lse in parts])

    return run


def planned(requests: Batch, page_size: int, **more: Any) -> Arguments:
    counts = [-(-n // page_size) for n in requests.lengths]
    return {
        "q_nope": randn(requests.tokens, HEADS, CKV, seed=1),
        "q_pe": randn(requests.tokens, HEADS, KPE, seed=2),
        "ckv_cache": randn(requests.pages, page_size, CKV, seed=3),
        "kpe_cache": randn(requests.pages, page_size, KPE, seed=4),
        "return_lse": True,
        "plan.qo_indptr": requests.starts,
        "plan.kv_indptr": starts(counts),
        "plan.kv_indices": torch.cat([requests.table[row, :count] for row, count in enumerate(counts)]),
        "plan.kv_len_arr": requests.seq_lens,
        "plan.causal": True,
        "plan.sm_scale": 0.07,
        **more,
    }


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("queries", [[1, 1, 1], [4, 1, 70]])
def test_flashinfers_wrapper(queries: list[int], page_size: int):
    requests = batch(queries, [20, 64, 90], page_size)

    def run(**call_arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.cat((call_arguments["q_nope"], call_arguments["q_pe"]), dim=-1)
        out, lse = latent_attention(requests, 0.07)(
            q, torch.cat((call_arguments["ckv_cache"], call_arguments["kpe_cache"]), dim=-1)
        )
        return out, lse if call_arguments.get("return_lse_base_on_e") else lse / math.log(2)

    kind = "decode" if max(queries) == 1 else "prefill_causal"
    kernel = agrees(FLASHINFER, run, **planned(requests, page_size))
    assert kernel.name == f"mla_paged_{kind}_h16_ckv512_kpe64_ps{page_size}"
    agrees(FLASHINFER, run, **planned(requests, page_size, return_lse_base_on_e=True))
    pairs = sum(n * (m - n) + n * (n + 1) // 2 for n, m in zip(queries, [20, 64, 90], strict=True))
    assert kernel.flops() == 2 * HEADS * (2 * CKV + KPE) * pairs


def by_flash_attention(requests: Batch, **more: Any) -> Arguments:
    """As vLLM passes latents to FlashAttention 3: views of one cache, the latent part of the queries apart."""
    cache = randn(requests.pages, 64, CKV + KPE, seed=2)
    return {
        "q": randn(requests.tokens, HEADS, KPE, seed=1),
        "k": cache[..., None, CKV:],
        "v": cache[..., None, :CKV],
        "q_v": randn(requests.tokens, HEADS, CKV, seed=3),
        "out": None,
        "cu_seqlens_q": requests.starts,
        "seqused_k": requests.seq_lens,
        "max_seqlen_q": max(requests.queries),
        "page_table": requests.table,
        "softmax_scale": 0.05,
        "is_causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        **more,
    }


@pytest.mark.parametrize("queries", [[1, 1, 1], [4, 1, 70]])
def test_flash_attention_over_latents(queries: list[int]):
    requests = batch(queries, [20, 64, 90], 64)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> list[torch.Tensor]:
        cache = torch.cat((v, k), dim=-1)[:, :, 0]
        out, lse = latent_attention(requests, 0.05)(torch.cat((more["q_v"], q), dim=-1), cache)
        return [out, lse.T]

    kernel = agrees("_vllm_fa3_C::fwd", run, **by_flash_attention(requests))
    kind = "decode" if max(queries) == 1 else "prefill_causal"
    assert (kernel.name, kernel.family) == (f"mla_paged_{kind}_h16_ckv512_kpe64_ps64", "mla_paged")
    for name, value in {"window_size_left": 9, "softcap": 5.0, "page_table": None, "s_aux": torch.ones(HEADS)}.items():
        assert declined("_vllm_fa3_C::fwd", **by_flash_attention(requests, **{name: value})), name


@pytest.mark.parametrize("operator", ["_flashmla_C::dense_decode_fwd", "sgl_kernel::fwd_kvcache_mla"])
def test_flash_mla(operator: str):
    requests = batch([1, 1, 1], [20, 64, 90], 64)
    cache = "kcache" if "dense" in operator else "kv_cache"

    def run(q: torch.Tensor, **more: Any) -> list[torch.Tensor]:
        out, lse = latent_attention(requests, more["softmax_scale"])(q[:, 0], more[cache][:, :, 0])
        return [out[:, None], lse[:, :, None]]

    call_arguments = {
        "q": randn(3, 1, HEADS, CKV + KPE, seed=1),
        cache: randn(requests.pages, 64, 1, CKV + KPE, seed=2),
        "head_size_v": CKV,
        "seqlens_k": requests.seq_lens,
        "block_table": requests.table,
        "softmax_scale": 0.05,
        "is_causal": True,
    }
    assert agrees(operator, run, **call_arguments).name == "mla_paged_decode_h16_ckv512_kpe64_ps64"
    unnamed = {f"_{place}": value for place, value in enumerate(call_arguments.values())}
    assert kernel_of(operator, **unnamed).name == "mla_paged_decode_h16_ckv512_kpe64_ps64"
    assert declined(operator, **call_arguments, is_fp8=True)
    assert declined(operator, **call_arguments, indices=requests.table)
    assert declined(operator, **{**call_arguments, "q": randn(3, 2, HEADS, CKV + KPE)})


def test_names_of_flashinfers_dataset():
    definition = checked(kernel_of(FLASHINFER, **planned(batch([1, 1], [9, 20], 64), 64)))
    assert definition.name == "mla_paged_decode_h16_ckv512_kpe64_ps64" and definition.op_type == "mla_paged"
    caches = "ckv_cache kpe_cache kv_indptr kv_indices kv_last_page_len sm_scale"
    assert " ".join(definition.inputs) == f"q_nope q_pe {caches}"
    assert list(definition.outputs) == ["output", "lse"]
    assert definition.const_axes == {"num_qo_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 64}
    assert set(definition.var_axes) == {"batch_size", "num_pages", "len_indptr", "num_kv_indices"}
    assert declined(FLASHINFER, **planned(batch([1], [9], 64), 64, **{"plan.logits_soft_cap": 30.0}))
    call_arguments = planned(batch([1], [9], 64), 64)
    assert declined(FLASHINFER, **{**call_arguments, "ckv_cache": call_arguments["ckv_cache"].to(torch.float8_e4m3fn)})

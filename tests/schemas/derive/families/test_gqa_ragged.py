"""gqa_ragged: the reference against PyTorch's attention, FlashInfer's names, what is declined."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn
from paging import attention, starts

WRAPPER = "flashinfer::BatchPrefillWithRaggedKVCacheWrapper.run"
SDPA = "aten::scaled_dot_product_attention"
BATCHES = [([5], [5]), ([1, 3], [9, 3]), ([64, 2, 7], [64, 30, 7]), ([1, 1], [1, 40]), ([600, 5], [600, 5])]
Arguments = dict[str, Any]


def arguments(queries: list[int], keys: list[int], heads: int, dim: int, v_dim: int, **more: Any) -> Arguments:
    kv_heads = heads if dim != v_dim else heads // 4
    return {
        "q": randn(sum(queries), heads, dim, seed=1),
        "k": randn(sum(keys), kv_heads, dim, seed=2),
        "v": randn(sum(keys), kv_heads, v_dim, seed=3),
        "return_lse": True,
        "plan.qo_indptr": starts(queries),
        "plan.kv_indptr": starts(keys),
        "plan.causal": True,
        **more,
    }


def flashinfer(**call_arguments: Any) -> Any:
    """An independent FlashInfer: PyTorch's own attention, sequence by sequence."""
    q, k, v = call_arguments["q"], call_arguments["k"], call_arguments["v"]
    begins = zip(call_arguments["plan.qo_indptr"].tolist(), call_arguments["plan.kv_indptr"].tolist(), strict=True)
    scale = call_arguments.get("plan.sm_scale") or q.shape[-1] ** -0.5
    parts = [
        attention(
            q[a:c], k[b:d], v[b:d], scale, call_arguments["plan.causal"], call_arguments.get("plan.window_left", -1)
        )
        for (a, b), (c, d) in pairwise(begins)
    ]
    output = torch.cat([out for out, _ in parts])
    lse = torch.cat([lse.T / math.log(2) for _, lse in parts])
    return (output, lse) if call_arguments["return_lse"] else output


@pytest.mark.parametrize(("queries", "keys"), BATCHES)
def test_flashinfers_wrapper(queries: list[int], keys: list[int]):
    kernel = agrees(WRAPPER, flashinfer, **arguments(queries, keys, 8, 64, 64))
    assert kernel.name == "gqa_ragged_prefill_causal_h8_kv2_d64" and kernel.family == "gqa_ragged"
    more = {"plan.causal": False, "plan.sm_scale": 0.3, "return_lse": False}
    kernel = agrees(WRAPPER, flashinfer, **arguments(queries, keys, 8, 64, 64, **more))
    assert kernel.name == "gqa_ragged_prefill_nolse_h8_kv2_d64" and list(kernel.outputs) == ["output"]


def test_window_of_flashinfers_wrapper():
    kernel = agrees(WRAPPER, flashinfer, **arguments([9, 40], [50, 70], 8, 64, 64, **{"plan.window_left": 12}))
    assert kernel.name == "gqa_ragged_prefill_causal_window12_h8_kv2_d64"
    assert kernel.flops() == 4 * 8 * 64 * (9 + 40) * 13


def test_values_of_another_size_are_latent_attentions():
    kernel = agrees(WRAPPER, flashinfer, **arguments([5, 2], [9, 2], 8, 192, 128))
    definition = checked(kernel)
    assert definition.name == "mla_ragged_prefill_causal_h8_qk192_vo128" and definition.op_type == "mla_ragged"
    assert definition.const_axes == {"num_qo_heads": 8, "num_kv_heads": 8, "qk_dim": 192, "vo_dim": 128}


def test_names_of_flashinfers_dataset():
    definition = checked(kernel_of(WRAPPER, **arguments([5], [5], 32, 128, 128)))
    assert definition.name == "gqa_ragged_prefill_causal_h32_kv8_d128"
    assert list(definition.inputs) == ["q", "k", "v", "qo_indptr", "kv_indptr", "sm_scale"]
    assert set(definition.var_axes) == {"total_q", "total_kv", "len_indptr"}
    capped = kernel_of(WRAPPER, **arguments([5], [5], 32, 128, 128, **{"plan.logits_soft_cap": 30.0}))
    assert checked(capped).name == "gqa_ragged_prefill_causal_softcap30_h32_kv8_d128"
    assert declined(WRAPPER, **arguments([5], [5], 32, 128, 128, **{"plan.custom_mask": torch.ones(5)}))


def test_flash_attention_without_a_page_table():
    call_arguments = arguments([5, 2], [9, 2], 8, 64, 64, **{"plan.sm_scale": 0.2})

    def run(**_: Any) -> list[torch.Tensor]:
        out, lse = flashinfer(**call_arguments)
        return [out, (lse * math.log(2)).T]

    kernel = agrees(
        "_vllm_fa2_C::varlen_fwd",
        run,
        q=call_arguments["q"],
        k=call_arguments["k"],
        v=call_arguments["v"],
        out=None,
        cu_seqlens_q=call_arguments["plan.qo_indptr"],
        cu_seqlens_k=call_arguments["plan.kv_indptr"],
        seqused_k=None,
        block_table=None,
        softmax_scale=0.2,
        is_causal=True,
        window_size_left=-1,
        window_size_right=-1,
        p_dropout=0.0,
    )
    assert kernel.name == "gqa_ragged_prefill_causal_h8_kv2_d64" and kernel.family == "gqa_ragged"


def test_prefill_of_latent_attention_by_flash_attention():
    """DeepSeek's: queries and keys of 192, values of 128; a chunk of what is cached is seen whole by every query."""
    for queries, keys, causal in [([5, 2], [5, 2], True), ([5, 2, 1], [16, 3, 0], False)]:
        call_arguments = arguments(queries, keys, 8, 192, 128, **{"plan.sm_scale": 0.2, "plan.causal": causal})

        def run(call_arguments: Arguments = call_arguments, **_: Any) -> list[torch.Tensor]:
            out, lse = flashinfer(**call_arguments)
            return [torch.where(lse.isneginf()[..., None], 0, out), (lse * math.log(2)).T, torch.empty(0)]

        kernel = agrees(
            "_vllm_fa3_C::fwd",
            run,
            **{name: call_arguments[name] for name in ("q", "k", "v")},
            cu_seqlens_q=call_arguments["plan.qo_indptr"],
            cu_seqlens_k=call_arguments["plan.kv_indptr"],
            max_seqlen_q=max(queries),
            softmax_scale=0.2,
            is_causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            cp_world_size=1,
        )
        assert kernel.name == f"mla_ragged_prefill{'_causal' * causal}_h8_qk192_vo128"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_attention_of_an_encoder(dtype: torch.dtype, dim: int):
    """Every token sees the others of its sequence (BERT, Whisper, a vision encoder), or those near it (ModernBERT)."""
    lengths = [7, 30, 1]
    for window in (-1, 5):
        call_arguments = {
            **{name: randn(38, 4, dim, dtype=dtype, seed=seed) for seed, name in enumerate(("q", "k", "v"))},
            "out": None,
            "cu_seqlens_q": starts(lengths),
            "cu_seqlens_k": starts(lengths),
            "seqused_k": None,
            "block_table": None,
            "softmax_scale": None,
            "is_causal": False,
            "window_size_left": window,
            "window_size_right": window,
        }

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> list[torch.Tensor]:
            window, scale = more["window_size_left"], q.shape[-1] ** -0.5
            parts = [
                attention(q[a:b], k[a:b], v[a:b], scale, False, window, window)
                for a, b in pairwise(more["cu_seqlens_q"].tolist())
            ]
            return [torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)]

        kernel = agrees("_vllm_fa3_C::fwd", run, **call_arguments)
        words = "" if window < 0 else "_window5_right5"
        assert kernel.name.startswith(f"gqa_ragged_prefill{words}") and kernel.name.endswith(f"_h4_kv4_d{dim}")
        seen = sum(min(n, i + 6) - max(0, i - 5) if window > 0 else n for n in lengths for i in range(n))
        assert kernel.flops() == 4 * 4 * dim * seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reference_is_atens_operator(dtype: torch.dtype):
    for seed, (n, h, kv, s, d) in enumerate([(1, 4, 4, 7, 16), (3, 8, 2, 33, 64), (2, 6, 6, 130, 32), (1, 2, 1, 1, 8)]):
        q = randn(n, h, s, d, dtype=dtype, seed=seed)
        k, v = (randn(n, kv, s, d, dtype=dtype, seed=seed + i) for i in (1, 2))
        for causal in (False, True):
            more = {"attn_mask": None, "dropout_p": 0.0, "is_causal": causal, "scale": None, "enable_gqa": True}
            kernel = agrees(SDPA, torch.ops.aten.scaled_dot_product_attention, query=q, key=k, value=v, **more)
            assert kernel.sizes({name: slot.get() for name, slot in kernel.inputs.items()})["len_indptr"] == n + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mask_shape", [(7, 9), (1, 9), (3, 1, 1, 9), (1, 8, 7, 9), (8, 7, 9)])
def test_a_mask_is_an_input(dtype: torch.dtype, mask_shape: tuple[int, ...]):
    q, k, v = (randn(3, h, s, d, dtype=dtype, seed=h + d) for h, s, d in [(8, 7, 16), (2, 9, 16), (2, 9, 32)])
    seen = randn(*mask_shape) > -1
    seen[..., 0] = True
    more = {"dropout_p": 0.0, "is_causal": False, "scale": 0.3, "enable_gqa": True}
    hidden = torch.zeros(mask_shape).masked_fill(~seen, -torch.inf)
    shared = {(7, 9): "_all_sequences", (1, 9): "_all_sequences_all_queries", (3, 1, 1, 9): "_all_queries"}
    words = ("_each_head" if 8 in mask_shape else "") + shared.get(mask_shape, "_all_sequences")
    other = "_fp32" if dtype == torch.bfloat16 else ""
    for mask, added in (seen, ""), (hidden.to(dtype), "_added"), (hidden, f"_added{other}"):
        attention = torch.ops.aten.scaled_dot_product_attention
        kernel = agrees(SDPA, attention, query=q, key=k, value=v, attn_mask=mask, **more)
        assert kernel.op_type == "attention_masked"
        assert kernel.name.startswith(f"attention_masked{added}{words}_")
        assert kernel.inputs["attn_mask"].get().numel() == mask.numel()
        assert kernel.flops() == 2 * int(seen.expand(3, 8, 7, 9).sum()) * (16 + 32)


def test_a_query_that_sees_no_key_gets_zeros():
    q, mask = randn(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool).tril(-1)
    more = {"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    agrees(SDPA, torch.ops.aten.scaled_dot_product_attention, query=q, key=q, value=q, attn_mask=mask, **more)


def test_masks_that_the_reference_does_not_model_are_declined():
    q, k = torch.empty(1, 4, 7, 16, device="meta"), torch.empty(1, 4, 9, 16, device="meta")
    assert declined(SDPA, query=q, key=k, value=k, is_causal=True)
    assert declined(SDPA, query=q, key=q, value=q, attn_mask=torch.empty(7, 7, dtype=torch.int64, device="meta"))
    assert declined(SDPA, query=q, key=q, value=q, dropout_p=0.1)
    assert declined(SDPA, query=q, key=q[:, :1], value=q[:, :1])
    assert declined(SDPA, query=q.expand(2, 4, 7, 16), key=q, value=q)
    assert not declined(SDPA, query=q, key=k, value=k)

"""What each family says that a Call must move and compute: numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import kernel_of, randn
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import Batch, batch, starts

from kcap.schemas.derive.cost import Cost, CostInputs, cost_function_for, cost_of_instance, distinct_bytes
from kcap.schemas.derive.families.attention.core import attended_pairs
from kcap.schemas.derive.families.attention.pages import table_pages
from kcap.schemas.derive.kernel import KernelInstance
from kcap.schemas.recording.values import Group

BF16, FP8, FLOAT, INT, LONG = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32, torch.int64


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cost(operator: str, **arguments: Any) -> Cost:
    return cost_of_instance(kernel_of(operator, **arguments))


def expected_cost(bytes_: int, read: int, flops: int, dtype: str = "bfloat16") -> Cost:
    return Cost(bytes_, read, flops, dtype)


def test_gemm_is_2mnk_and_three_matrices():
    read = 2 * (64 * 4096 + 6144 * 4096)
    assert cost("aten::linear", input=meta(64, 4096), weight=meta(6144, 4096)) == expected_cost(
        read + 2 * 64 * 6144, read, 2 * 64 * 6144 * 4096
    )
    with_bias = cost("aten::linear", input=meta(64, 4096), weight=meta(6144, 4096), bias=meta(6144))
    assert with_bias.read == read + 2 * 6144
    assert cost("aten::bmm", self=meta(16, 7, 128), mat2=meta(16, 128, 512)) == expected_cost(
        2 * 16 * (7 * 128 + 128 * 512 + 7 * 512), 2 * 16 * (7 * 128 + 128 * 512), 2 * 16 * 7 * 128 * 512
    )


def test_a_broadcast_matrix_is_read_once():
    b = meta(1, 128, 512).expand(16, 128, 512)
    assert cost("aten::bmm", self=meta(16, 7, 128), mat2=b).read == 2 * (16 * 7 * 128 + 128 * 512)
    assert distinct_bytes(meta(4, 8)[:, :2]) == 2 * 8 and distinct_bytes(meta(0, 8)) == 0


def test_quantized_gemm_computes_in_its_own_dtype():
    a, b = meta(64, 4096, dtype=FP8), meta(4096, 6144, dtype=FP8)
    scales = {"a_scales": meta(64, 1, dtype=FLOAT), "b_scales": meta(6144, 1, dtype=FLOAT)}
    out = meta(64, 6144)
    read = 64 * 4096 + 4096 * 6144 + 4 * (64 + 6144)
    assert cost("_C::cutlass_scaled_mm", out=out, a=a, b=b, **scales) == expected_cost(
        read + 2 * 64 * 6144, read, 2 * 64 * 6144 * 4096, "float8_e4m3fn"
    )


def test_elementwise_families_read_and_write_each_element_once():
    x, weight = meta(32, 4096), meta(4096)
    assert cost("_C::rms_norm", result=x, input=x, weight=weight, epsilon=1e-5) == expected_cost(
        2 * (2 * 32 * 4096 + 4096), 2 * (32 * 4096 + 4096), 4 * 32 * 4096
    )
    fused = cost("_C::fused_add_rms_norm", input=x, residual=x, weight=weight, epsilon=1e-5)
    assert fused == expected_cost(2 * (4 * 32 * 4096 + 4096), 2 * (2 * 32 * 4096 + 4096), 5 * 32 * 4096)
    gated = cost("_C::silu_and_mul", result=meta(32, 14336), input=meta(32, 28672))
    assert gated == expected_cost(2 * 3 * 32 * 14336, 2 * 2 * 32 * 14336, 5 * 32 * 14336)
    static = {"scale": meta(1, dtype=FLOAT), "epsilon": 1e-5, "weight": weight}
    normed = cost("_C::rms_norm_static_fp8_quant", result=meta(32, 4096, dtype=FP8), input=x, **static)
    assert normed == expected_cost(3 * 32 * 4096 + 2 * 4096 + 4, 2 * 32 * 4096 + 2 * 4096 + 4, 6 * 32 * 4096)
    q, scale = meta(32, 4096, dtype=FP8), meta(32, 1, dtype=FLOAT)
    quantized = cost("_C::dynamic_per_token_scaled_fp8_quant", result=q, input=x, scale=scale)
    assert quantized == expected_cost(3 * 32 * 4096 + 4 * 32, 2 * 32 * 4096, 4 * 32 * 4096)
    summed = cost("_moe_C::moe_sum", input=meta(32, 8, 2048), output=meta(32, 2048))
    assert summed == expected_cost(2 * 9 * 32 * 2048, 2 * 8 * 32 * 2048, 32 * 8 * 2048)
    routed = {"topk_weights": meta(32, 8, dtype=FLOAT), "topk_indices": meta(32, 8, dtype=INT), "renormalize": True}
    chosen = cost("_moe_C::topk_softmax", gating_output=meta(32, 128, dtype=FLOAT), **routed)
    assert chosen == expected_cost(4 * 32 * (128 + 16), 4 * 32 * 128, 5 * 32 * 128, "float32")


@pytest.mark.parametrize("copies", [False, True])
def test_rope_writes_what_it_does_not_rotate_only_where_it_copies(copies: bool):
    """Three tokens at two positions; 64 of 128 numbers of a head are rotated."""
    operator = "flashinfer::apply_rope_with_cos_sin_cache" + ("" if copies else "_inplace")
    arguments = {
        "positions": torch.tensor([5, 5, 9]),
        "query": randn(3, 4 * 128),
        "key": randn(3, 2 * 128),
        "head_size": 128,
        "cos_sin_cache": torch.rand(16, 64),
        "is_neox": True,
    }
    least = cost(operator, **arguments)
    assert least.bytes == 2 * 3 * 6 * (128 if copies else 64) * 2 + 3 * 8 + 2 * 64 * 4
    assert least.flops == 3 * 3 * 6 * 64


def test_embedding_reads_distinct_rows():
    weight = torch.empty(1000, 4096, dtype=BF16)
    least = cost("aten::embedding", weight=weight, indices=torch.tensor([[3, 3], [7, 3]]))
    assert least == expected_cost(2 * 4096 * (4 + 2) + 4 * 8, 2 * 4096 * 2 + 4 * 8, 0)


def flash(batch_: Batch, heads: int = 8, kv: int = 2, dim: int = 64, **more: Any) -> dict[str, Any]:
    cache = randn(batch_.pages, 16, kv, dim)
    return {
        "q": randn(batch_.tokens, heads, dim),
        "k": cache,
        "v": cache,
        "cu_seqlens_q": batch_.starts,
        "seqused_k": batch_.seq_lens,
        "page_table": batch_.table,
        "max_seqlen_q": max(batch_.queries),
        "is_causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        **more,
    }


def test_attention_of_a_causal_prefill():
    """5 new of 9 tokens: 5 + 6 + 7 + 8 + 9 pairs; 40 of 40: 40 · 41 / 2."""
    least = cost("_vllm_fa3_C::fwd", **flash(batch([5, 40], [9, 40], 16)))
    assert least.flops == 4 * 8 * 64 * (35 + 820)
    assert least.bytes == 2 * 64 * (2 * 2 * 49 + 2 * 8 * 45) + 4 * 8 * 45
    assert least.read == least.bytes - 45 * 8 * (2 * 64 + 4)
    every = cost("_vllm_fa3_C::fwd", **flash(batch([5, 40], [9, 40], 16), is_causal=False))
    assert every.flops == 4 * 8 * 64 * (5 * 9 + 40 * 40) and every.bytes == least.bytes


def test_attention_with_a_window_reads_the_window():
    """Of 100 tokens the last query sees itself and 12 before."""
    least = cost("_vllm_fa3_C::fwd", **flash(batch([1], [100], 16), window_size_left=12))
    assert least.flops == 4 * 8 * 64 * 13 and least.bytes == 2 * 64 * (2 * 2 * 13 + 2 * 8) + 4 * 8


def test_pages_that_sequences_share_are_read_once():
    """Two sequences of 40 tokens with the same three pages, as after a common prompt."""
    both = batch([1, 1], [40, 36], 16)
    shared = Batch(both.queries, both.lengths, both.table[:1].repeat(2, 1), both.pages)
    apart, least = (cost("_vllm_fa3_C::fwd", **flash(one)) for one in (both, shared))
    assert apart.flops == least.flops == 4 * 8 * 64 * 76
    assert least.bytes == 2 * 64 * (2 * 2 * 40 + 2 * 8 * 2) + 4 * 8 * 2
    assert apart.bytes - least.bytes == 2 * 64 * 2 * 2 * 36


def test_both_forms_of_a_decode_cost_the_same():
    """Of an invocation, and of a Workload; one of the sequences is padding."""
    padded = batch([1, 1, 1], [40, 100, 0], 16)
    kernel = kernel_of("_vllm_fa3_C::fwd", **flash(padded, window_size_left=12))
    form = kernel.engine_form
    assert isinstance(form, KernelInstance)
    least = cost_of_instance(kernel)
    assert cost_of_instance(form) == least and least.flops == 4 * 8 * 64 * 2 * 13
    of_workload = cost_function_for("gqa_paged")
    assert of_workload is not None
    costs = [
        of_workload(CostInputs(each.definition(), {name: slot.get() for name, slot in each.inputs.items()}))
        for each in (kernel, form)
    ]
    assert costs[0] == costs[1] and costs[0].flops == least.flops


def test_attention_whose_lengths_are_not_known_counts_nothing():
    unknown = flash(batch([1], [40], 16), seqused_k=meta(1, dtype=INT))
    least = cost("_vllm_fa3_C::fwd", **unknown)
    assert (least.bytes, least.flops) == (0, 0)


def test_ragged_attention():
    """Keys and values of a sequence without queries are not read."""
    arguments = {"q": randn(6, 8, 64), "k": randn(14, 2, 64), "v": randn(14, 2, 64)}
    least = cost(
        "_vllm_fa2_C::varlen_fwd",
        **arguments,
        cu_seqlens_q=starts([4, 2, 0]),
        cu_seqlens_k=starts([4, 3, 7]),
        is_causal=True,
        window_size_left=-1,
        window_size_right=-1,
    )
    assert least.flops == 4 * 8 * 64 * (10 + 5)
    assert least.bytes == 2 * 2 * 64 * (2 * 7 + 8 * 6) + 4 * 8 * 6


def test_latent_attention_reads_a_row_once_for_keys_and_values():
    arguments = {
        "query": randn(2, 16, 576),
        "kv_cache": randn(8, 16, 576),
        "out": randn(2, 16, 512),
        "scale": 0.1,
        "block_tables": batch([1, 1], [20, 33], 16).table,
        "seq_lens": torch.tensor([20, 33], dtype=INT),
    }
    least = cost("_C::mla_decode_kvcache", **arguments)
    assert least.flops == 2 * 16 * (512 + 64 + 512) * 53
    assert least.bytes == 2 * (53 * 576 + 2 * 16 * (576 + 512))


def test_cache_update_moves_the_tokens_that_have_slots():
    cache = torch.empty(8, 16, 2, 64, dtype=BF16)
    slots = torch.tensor([3, 17, -1, 40, -1])
    keys = randn(6, 2, 64)
    least = cost(
        "_C_cache_ops::reshape_and_cache_flash",
        key=keys,
        value=keys,
        key_cache=cache,
        value_cache=cache,
        slot_mapping=slots,
    )
    assert least.bytes == 3 * 4 * 2 * 64 * 2 + 5 * 8 and least.flops == 0
    latent = {"kv_c": randn(5, 512), "k_pe": randn(5, 64), "kv_cache": torch.empty(8, 16, 576, dtype=BF16)}
    assert cost("_C_cache_ops::concat_and_cache_mla", **latent, slot_mapping=slots).bytes == 3 * 2 * 576 * 2 + 5 * 8


def test_fused_moe_counts_the_chosen_experts_of_this_rank():
    """Expert 9 of 4 is another rank's: 5 pairs on 2 experts."""
    ids = torch.tensor([[0, 3], [3, 0], [3, 9]])
    given_ = {"hidden_states": randn(3, 64), "topk_weights": torch.rand(3, 2), "topk_ids": ids}
    least = cost("_C::fused_experts_cpu", **given_, w1=randn(4, 64, 64), w2=randn(4, 64, 32))
    assert least.flops == 2 * 5 * (64 * 64 + 64 * 32)
    assert least.bytes == 2 * 2 * (64 * 64 + 64 * 32) + 2 * 3 * 64 * 2 + 6 * 4 + 6 * 8
    unknown = cost(
        "_C::fused_experts_cpu", **{**given_, "topk_ids": ids.to("meta")}, w1=randn(4, 64, 64), w2=randn(4, 64, 32)
    )
    assert unknown.flops == 2 * 6 * (64 * 64 + 64 * 32) and unknown.bytes == least.bytes  # two experts at least


def test_moe_gemm_counts_rows_of_this_rank():
    shapes = {"a_ptr": (4, 32), "b_ptr": (8, 16, 32), "c_ptr": (4, 1, 16)}
    arguments: dict[str, Any] = {name: randn(*shape) for name, shape in shapes.items()}
    arguments["expert_ids_ptr"] = torch.tensor([2, -1, 2, 5], dtype=INT)
    least = cost("triton::fused_moe_kernel", **arguments)
    assert least.flops == 2 * 3 * 16 * 32
    assert least.bytes == 2 * (4 * 32 + 4 * 16 + 2 * 16 * 32)


@pytest.mark.parametrize(
    ("operator", "rows", "layout"),
    [
        ("aten::_grouped_mm", (10,), {"offs": torch.tensor([4, 4, 7], dtype=INT)}),
        (
            "deep_gemm::m_grouped_bf16_gemm_nt_contiguous",
            (10,),
            {"m_indices": torch.tensor([0] * 4 + [2] * 3 + [-1] * 3)},
        ),
        ("deep_gemm::m_grouped_bf16_gemm_nt_masked", (3, 8), {"masked_m": torch.tensor([4, 0, 3])}),
    ],
)
def test_grouped_gemm_counts_rows_of_groups_and_groups_with_rows(operator: str, rows: tuple[int, ...], layout: Any):
    """Seven rows of two of the three groups; the others are padding."""
    a, b = randn(*rows, 32), randn(3, 16, 32)
    names = {"self": a, "mat2": b.transpose(1, 2)} if "aten" in operator else {"a": a, "b": b, "d": randn(*rows, 16)}
    least = cost(operator, **names, **layout)
    assert least.flops == 2 * 7 * 16 * 32 and least.bytes == 2 * (7 * (32 + 16) + 2 * 16 * 32)
    unknown = {name: value.to("meta") for name, value in layout.items()}
    assert cost(operator, **names, **unknown).bytes == cost(operator, **names, **unknown).flops == 0


def test_sampling():
    logits = meta(4, 128256, dtype=FLOAT)
    least = cost("aten::argmax", self=logits, dim=-1)
    assert least == expected_cost(4 * 4 * 128256 + 4 * 8, 4 * 4 * 128256, 4 * 128256, "float32")
    drawn = cost("flashinfer::top_p_sampling_from_probs", probs=logits, top_p=0.9)
    assert drawn.bytes == 2 * 4 * 128256  # a draw without a filter reads half of them
    masks = {name: meta(4, 128256, dtype=torch.bool) for name in ("prompt_mask", "output_mask")}
    penalties = {"repetition_penalties": meta(4, dtype=FLOAT)}
    assert cost("_C::apply_repetition_penalties_", logits=logits, **masks, **penalties).bytes == 4 * 128256


def test_small_kernels_of_indices():
    align = {"sorted_token_ids": meta(8000, dtype=INT), "experts_ids": meta(500, dtype=INT)}
    least = cost(
        "_moe_C::moe_align_block_size",
        topk_ids=meta(8, 8, dtype=INT),
        num_experts=128,
        block_size=16,
        num_tokens_post_pad=meta(1, dtype=INT),
        **align,
    )
    assert least.bytes == 4 * (64 + 64 + 1)
    tables = {
        "query_start_loc": meta(3, dtype=INT),
        "positions": meta(50, dtype=LONG),
        "block_table": meta(2, 9, dtype=INT),
    }
    slots = meta(50, dtype=LONG)
    least = cost("_C::compute_slot_mapping_kernel_impl", **tables, block_size=16, slot_mapping=slots)
    assert least.bytes == 50 * 16 + 3 * 4


def test_all_reduce_is_one_ranks_tensor_in_and_out():
    x = meta(32, 4096)
    least = cost("vllm::all_reduce", tensor=x, group=Group(8, 0))
    assert least.bytes == 2 * 2 * 32 * 4096


def test_two_arguments_that_are_one_tensor_are_read_once():
    assert Cost(300, 200, 7, "float32").within(150) == Cost(250, 150, 7, "float32")
    assert Cost(300, 200, 7, "float32").within(1000) == Cost(300, 200, 7, "float32")


LENGTHS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.booleans(), st.sampled_from([-1, 0, 3, 12]), st.sampled_from([1, 4, 16]))
def test_pairs_and_rows_are_those_of_the_mask(sizes: list[tuple[int, int]], causal: bool, window: int, page_size: int):
    """Against masks written out; pages apart, so that no row is shared."""
    queries = [n for n, _ in sizes]  # more than keys, too: the first of them see nothing
    lengths = [m for _, m in sizes]
    seen = [mask(n, m, causal, window) for n, m in zip(queries, lengths, strict=True)]
    given_q, given_m = torch.tensor(queries), torch.tensor(lengths)
    assert attended_pairs(given_m, given_q, causal, window) == sum(int(one.sum()) for one in seen)
    drawn = batch(queries, lengths, page_size)
    rows = table_pages(drawn.table, drawn.seq_lens, page_size).rows(given_q, window)
    assert rows == sum(int(one.any(0).sum()) for one in seen)


def mask(queries: int, keys: int, causal: bool, window: int) -> torch.Tensor:
    """[queries, keys]: the last query stands at the last key."""
    far = torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - (keys - queries)
    return (far <= 0 if causal else torch.ones_like(far, dtype=torch.bool)) & ((far >= -window) | (window < 0))

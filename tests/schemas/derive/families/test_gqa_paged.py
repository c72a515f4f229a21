"""gqa_paged: the reference against vLLM's CPU operator and PyTorch's attention, names, padding, what is declined."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, randn
from paging import Batch, attention, batch, share_of_keys, starts, tokens_of

from kcap.replay.rebuild.memory import Target, build_inputs
from kcap.replay.rebuild.rebuild import apply_rule
from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.families import replay_rule_for
from kcap.schemas.derive.families.attention.gqa_paged import flashinfer_prefill
from kcap.schemas.derive.invocation import Invocation, Unrecognized
from kcap.schemas.derive.kernel import KernelInstance
from kcap.schemas.recording.records import Argument
from kcap.schemas.recording.values import TensorSpec

Arguments = dict[str, Any]
HEADS, KV_HEADS, DIM = 8, 2, 64
DECODES = [[1], [33, 5], [128, 31, 64, 1], [200, 7, 90], [32, 32, 300]]
PREFILLS = [([64], [64]), ([3, 1], [40, 5]), ([1, 70, 2], [33, 70, 64]), ([100, 1], [100, 257]), ([600], [640])]


def on_cpu(
    requests: Batch, dtype: torch.dtype, isa: str = "vec", window: int = -1, seed: int = 0, **more: Any
) -> Arguments:
    """Arguments of vLLM's CPU attention over caches that its own operator filled."""
    kv = torch.zeros(requests.pages, KV_HEADS, 2 * 32, DIM, dtype=dtype)
    key_cache, value_cache = kv.chunk(2, dim=2)
    slots = torch.arange(requests.pages * 32)
    keys, values = (randn(len(slots), KV_HEADS, DIM, dtype=dtype, seed=seed + n) for n in (1, 2))
    torch.ops._C.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)
    metadata = torch.ops._C.get_scheduler_metadata(
        *(len(requests.lengths), HEADS, KV_HEADS, DIM, requests.seq_lens, dtype, requests.starts),
        *(more.get("causal", True), window, isa, True, None, "auto"),
    )
    q = randn(requests.tokens, 3 * HEADS, DIM, dtype=dtype, seed=seed)[:, :HEADS]
    return {
        "query": q,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "output": torch.empty(requests.tokens, HEADS, DIM, dtype=dtype),
        "query_start_loc": requests.starts,
        "seq_lens": requests.seq_lens,
        "scale": DIM**-0.5,
        "causal": True,
        "alibi_slopes": None,
        "sliding_window_size": window,
        "block_table": requests.table,
        "softcap": 0.0,
        "scheduler_metadata": metadata,
        "s_aux": None,
        "dynamic_causal": None,
        **more,
    }


@pytest.fixture
def vllm() -> Callable[..., Any]:
    load_vllm_kernels()
    return torch.ops._C.cpu_attention_with_kv_cache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("isa", ["vec", "vec16"])
def test_decode_is_vllms_cpu_operator(vllm: Callable[..., Any], dtype: torch.dtype, isa: str):
    for seed, lengths in enumerate(DECODES):
        requests = batch([1] * len(lengths), lengths, 32, seed)
        kernel = agrees("_C::cpu_attention_with_kv_cache", vllm, **on_cpu(requests, dtype, isa, seed=seed))
        assert kernel.name.startswith("gqa_paged_decode_nolse")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_prefill_is_vllms_cpu_operator(vllm: Callable[..., Any], dtype: torch.dtype):
    for seed, (queries, lengths) in enumerate(PREFILLS):
        requests = batch(queries, lengths, 32, seed)
        kernel = agrees("_C::cpu_attention_with_kv_cache", vllm, **on_cpu(requests, dtype, seed=seed))
        assert kernel.name.startswith("gqa_paged_prefill_causal_nolse")


@pytest.mark.parametrize("queries", [[1, 1], [70, 1], [5, 64]])
def test_window_is_vllms_cpu_operator(vllm: Callable[..., Any], queries: list[int]):
    requests = batch(queries, [90, 64], 32)
    kernel = agrees("_C::cpu_attention_with_kv_cache", vllm, **on_cpu(requests, torch.float32, window=16))
    assert "_window15_" in kernel.name


@pytest.mark.parametrize(("queries", "scale"), [([1, 1], 0.1), ([70, 1], 10.0)])
def test_soft_capping_is_vllms_cpu_operator(vllm: Callable[..., Any], queries: list[int], scale: float):
    requests = batch(queries, [90, 64], 32)
    more = on_cpu(requests, torch.float32, window=16, softcap=5.0, scale=scale)
    kernel = agrees("_C::cpu_attention_with_kv_cache", vllm, **more)
    assert "_window15_softcap5_" in kernel.name
    assert "5.0 * torch.tanh(logits / 5.0)" in kernel.reference


@pytest.mark.parametrize("queries", [[1, 1], [70, 1]])
def test_sinks_are_vllms_cpu_operators(vllm: Callable[..., Any], queries: list[int]):
    requests = batch(queries, [90, 64], 32)
    sinks = randn(HEADS, dtype=torch.bfloat16, seed=4)
    for dtype in (torch.bfloat16, torch.float32):
        kernel = agrees("_C::cpu_attention_with_kv_cache", vllm, **on_cpu(requests, dtype, window=16, s_aux=sinks))
        assert "_window15_sinks_" in kernel.name


@pytest.mark.parametrize("queries", [[1, 1], [70, 1]])
def test_biases_by_distance_are_vllms_cpu_operators(vllm: Callable[..., Any], queries: list[int]):
    requests, slopes = batch(queries, [90, 64], 32), torch.exp2(-torch.arange(1.0, HEADS + 1))
    for dtype in (torch.bfloat16, torch.float32):
        more = on_cpu(requests, dtype, alibi_slopes=slopes)
        kernel = agrees("_C::cpu_attention_with_kv_cache", vllm, **more)
        assert "_alibi_" in kernel.name and list(kernel.inputs)[-1] == "alibi_slopes"
        without = kernel_of("_C::cpu_attention_with_kv_cache", **{**more, "alibi_slopes": None})
        assert kernel.touched() == without.touched() + 4 * HEADS


def test_attention_that_is_not_causal_is_vllms_cpu_operator(vllm: Callable[..., Any]):
    requests = batch([30, 7], [90, 64], 32)
    kernel = agrees("_C::cpu_attention_with_kv_cache", vllm, **on_cpu(requests, torch.float32, causal=False))
    assert kernel.name.startswith("gqa_paged_prefill_nolse")


def flash(requests: Batch, dtype: torch.dtype, page_size: int, seed: int = 0, **more: Any) -> Arguments:
    """Arguments of FlashAttention 3 as vLLM passes them."""
    shape = (requests.pages, page_size, KV_HEADS, DIM)
    q = randn(requests.tokens, HEADS, DIM, dtype=dtype, seed=seed)
    return {
        "q": q,
        "k": randn(*shape, dtype=dtype, seed=seed + 1),
        "v": randn(*shape, dtype=dtype, seed=seed + 2),
        "out": torch.empty_like(q),
        "cu_seqlens_q": requests.starts,
        "seqused_k": requests.seq_lens,
        "max_seqlen_q": max(requests.queries),
        "page_table": requests.table,
        "q_descale": torch.ones(1, 1).expand(len(requests.lengths), KV_HEADS),
        "softmax_scale": 0.1,
        "is_causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "cp_world_size": 1,
        **more,
    }


def flash_attention(requests: Batch) -> Callable[..., Any]:
    """An independent FlashAttention: PyTorch's own, sequence by sequence."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, **more: Any) -> list[torch.Tensor]:
        lse = torch.zeros(q.shape[1], len(q))
        for row, (start, n) in enumerate(zip(requests.starts.tolist(), requests.queries, strict=False)):
            keys, values, rows = tokens_of(k, requests, row), tokens_of(v, requests, row), slice(start, start + n)
            bounds = more["is_causal"], more["window_size_left"], more.get("window_size_right", -1)
            out[rows], lse[:, rows] = attention(q[rows], keys, values, more["softmax_scale"], *bounds)
        if more.get("s_aux") is not None:
            out.copy_(out * share_of_keys(lse, more["s_aux"]))
        return [out, lse]

    return run


@pytest.mark.parametrize("page_size", [1, 16])
def test_flash_attention_gives_outputs_and_their_log_sums_in_base_2(page_size: int):
    cases = [([1] * len(n), n) for n in DECODES] + PREFILLS
    for seed, (queries, lengths) in enumerate(cases):
        requests = batch(queries, lengths, page_size, seed)
        kernel = agrees(
            "_vllm_fa3_C::fwd", flash_attention(requests), **flash(requests, torch.bfloat16, page_size, seed)
        )
        assert list(kernel.outputs) == ["output", "lse"]
        assert ("kv_last_page_len" in kernel.inputs) == (page_size > 1)


def test_window_of_flash_attention():
    requests = batch([9, 40], [50, 70], 16)
    more = {"window_size_left": 12, "window_size_right": 0, "is_causal": True}
    kernel = agrees("_vllm_fa3_C::fwd", flash_attention(requests), **flash(requests, torch.float32, 16, **more))
    assert kernel.name == "gqa_paged_prefill_causal_window12_fp32_h8_kv2_d64_ps16"
    assert kernel.flops() == 4 * HEADS * DIM * (9 * 13 + 40 * 13)


MIXED = [([1] * 4, [20, 64, 1, 90]), ([1, 1, 64], [20, 64, 64]), ([1, 30, 1, 7], [50, 90, 64, 7])]


@pytest.mark.parametrize(("queries", "lengths"), MIXED)
def test_sinks_and_windows_of_flash_attention(queries: list[int], lengths: list[int]):
    """gpt-oss: sinks in every layer, a window in every second. Decodes, prefills and chunks of prefills together."""
    requests = batch(queries, lengths, 16)
    kind = "decode" if max(queries) == 1 else "prefill_causal"
    for window in (-1, 12):
        more = {"window_size_left": window, "window_size_right": 0, "s_aux": randn(HEADS, seed=4)}
        arguments = flash(requests, torch.bfloat16, 16, **more)
        kernel = agrees("_vllm_fa3_C::fwd", flash_attention(requests), **arguments)
        words = "_window12_sinks" if window > 0 else "_sinks"
        assert kernel.name == f"gqa_paged_{kind}{words}_nolse_h8_kv2_d64_ps16"
        assert (list(kernel.inputs)[-1], list(kernel.outputs)) == ("sinks", ["output"])
        assert kernel.inputs["sinks"].shape == ("num_qo_heads",)


def test_cross_attention_reads_all_keys():
    """Of an encoder and a decoder (Whisper): the queries of a decoder's prompt see the keys of its whole encoder."""
    for queries, lengths in [([4, 1, 70], [50, 64, 33]), ([1, 1], [50, 64])]:
        requests = batch(queries, lengths, 16)
        arguments = flash(requests, torch.float16, 16, is_causal=False)
        kernel = agrees("_vllm_fa3_C::fwd", flash_attention(requests), **arguments)
        assert kernel.name.startswith("gqa_paged_decode_fp16" if max(queries) == 1 else "gqa_paged_prefill_fp16")


def test_padding_of_a_graphs_decode_is_zero():
    """A graph of four with two sequences: the rows after them keep what was there, which no reference knows."""
    requests = batch([1, 1], [20, 5], 16)
    arguments = flash(requests, torch.bfloat16, 16)
    q = randn(4, HEADS, DIM, seed=4)
    padded = {
        "q": q,
        "out": torch.full_like(q, 7.0),
        "cu_seqlens_q": torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32),
        "seqused_k": torch.tensor([20, 5, 0, 0], dtype=torch.int32),
        "page_table": torch.cat([requests.table, requests.table]),
    }
    kernel = agrees("_vllm_fa3_C::fwd", flash_attention(requests), **{**arguments, **padded})
    assert kernel.outputs["output"].get()[2:].abs().max() == 0
    form = engine_form(kernel)
    assert form.inputs["block_table"].get()[:, :3].tolist() == [
        [*requests.table[0, :2].tolist(), -1], [requests.table[1, 0].item(), -1, -1], [-1] * 3, [-1] * 3
    ]  # fmt: skip
    assert kernel.touched() == (2 * KV_HEADS * 25 + 2 * HEADS * 2) * DIM * 2 + 4 * HEADS * 2


@pytest.mark.parametrize("window", [-1, 12])
def test_unified_attention_in_triton(window: int):
    def run(**call_arguments: Any) -> None:
        q, caches = call_arguments["query_ptr"], (call_arguments["key_cache_ptr"], call_arguments["value_cache_ptr"])
        more = {"window_size_left": window, "softmax_scale": call_arguments["scale"], "is_causal": True}
        flash_attention(requests)(q, *caches, call_arguments["output_ptr"], **more)

    operator = "triton::kernel_unified_attention.s01234567"
    for queries, lengths in [([9, 40], [50, 70]), ([1, 1, 1], [33, 7, 16])]:
        requests = batch(queries, lengths, 16)
        call_arguments = flash(requests, torch.bfloat16, 16)
        tensors = {
            "query_ptr": call_arguments["q"],
            "output_ptr": call_arguments["out"],
            "key_cache_ptr": call_arguments["k"],
            "value_cache_ptr": call_arguments["v"],
            "block_tables_ptr": requests.table,
            "seq_lens_ptr": requests.seq_lens,
            "query_start_len_ptr": requests.starts,
        }
        constants = {"scale": 0.1, "SLIDING_WINDOW": window + 1, "IS_3D": False, "USE_SOFTCAP": False}
        kernel = agrees(operator, run, **tensors, **constants)
        assert kernel.name.startswith("gqa_paged_decode" if queries[0] == 1 else "gqa_paged_prefill_causal")
    capped = kernel_of(operator, **tensors, **{**constants, "USE_SOFTCAP": True, "softcap": 50.0})
    assert "_softcap50_" in capped.name
    sunk = kernel_of(operator, **tensors, **{**constants, "USE_SINKS": True, "sink_ptr": randn(HEADS)})
    assert "_sinks_" in sunk.name and list(sunk.inputs)[-1] == "sinks"
    biased = {**constants, "USE_ALIBI_SLOPES": True, "alibi_slopes_ptr": randn(HEADS, dtype=torch.float32)}
    assert "_alibi_" in kernel_of(operator, **tensors, **biased).name
    assert declined(operator, **tensors, **{**biased, "USE_ALIBI_SQRT": True})
    for name in ("IS_3D", "USE_SINKS", "USE_ALIBI_SLOPES"):
        assert declined(operator, **tensors, **{**constants, name: True}), name
    assert declined(operator, **tensors, **{**constants, "CHUNK_LOOKBACK": 2})
    assert declined(operator, **tensors, scale=0.1), "nothing tells whether there is a window"


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def llama() -> Arguments:
    """A decode of 16 sequences in a graph."""
    return {
        "q": meta(16, 32, 128),
        "k": meta(57056, 16, 8, 128),
        "v": meta(57056, 16, 8, 128),
        "out": meta(16, 32, 128),
        "cu_seqlens_q": meta(17, dtype=torch.int32),
        "seqused_k": meta(16, dtype=torch.int32),
        "page_table": meta(16, 128, dtype=torch.int32),
        "max_seqlen_q": 1,
        "softmax_scale": 0.088,
        "is_causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
    }


def engine_form(kernel: KernelInstance) -> KernelInstance:
    assert isinstance(kernel.engine_form, KernelInstance), kernel.engine_form
    return kernel.engine_form


def test_a_decode_has_a_form_with_the_engines_own_table():
    form = engine_form(kernel_of("_vllm_fa3_C::fwd", **llama()))
    assert checked(form).name == "gqa_table_decode_h32_kv8_d128_ps16"
    assert " ".join(form.inputs) == "q k_cache v_cache block_table seq_lens sm_scale"
    assert form.outputs["lse"].shape == ("num_qo_heads", "batch_size")
    assert form.operator.returned is not None
    assert [tuple(tensor.shape) for tensor in form.operator.returned()] == [(16, 32, 128), (32, 16), (0,), (0,)]
    windowed = kernel_of("_vllm_fa2_C::varlen_fwd", **{**llama(), "window_size_left": 12})
    assert engine_form(windowed).name == "gqa_table_decode_window12_h32_kv8_d128_ps16"


def test_sglang_passes_the_starts_of_new_keys_where_there_are_none():
    """Its latent attention and its prefills do; FlashAttention reads them beside `k_new` alone."""
    starts_of_new = {"k_new": None, "v_new": None, "cu_seqlens_k_new": meta(17, dtype=torch.int32)}
    starts_of_new |= {"attention_chunk": 0, "only_qv": False, "sparse_mask_fine": None}
    assert kernel_of("sgl_kernel::fwd", **llama(), **starts_of_new).name == kernel_of("sgl_kernel::fwd", **llama()).name
    assert declined("sgl_kernel::fwd", **llama(), **{**starts_of_new, "k_new": meta(16, 8, 128)})


def test_replay_of_sglangs_decode_makes_its_schedule(monkeypatch: pytest.MonkeyPatch):
    """As vLLM's, but for the chunk behind the window, and the longest context, which only the metadata's maker knew."""
    ints = {"cu_seqlens_q": (3,), "cu_seqlens_k_new": (3,), "seqused_k": (2,), "page_table": (2, 8)}
    shapes = {"q": (2, 32, 128), "k": (900, 16, 8, 128), "v": (900, 16, 8, 128), **ints, "scheduler_metadata": (3,)}
    values: dict[str, Any] = {
        name: TensorSpec(shape, "int32" if len(shape) < 3 else "bfloat16", storage=place)
        for place, (name, shape) in enumerate(shapes.items())
    }
    values |= {"k_new": None, "max_seqlen_q": 1, "max_seqlen_k": None, "is_causal": True, "window_size_left": -1}
    values |= {"window_size_right": -1, "attention_chunk": 0, "softcap": 0.0, "num_splits": 0, "pack_gqa": None}
    values |= {"sm_margin": 0}
    bound = BoundCall("sgl_kernel::fwd", [Argument(name=name, value=value) for name, value in values.items()])
    known = {"cu_seqlens_q": [0, 1, 2], "seqused_k": [100, 5], "page_table": [[7] * 8, [800] * 8]}
    for name, content in known.items():
        bound.set_content(name, torch.tensor(content))
    rule = replay_rule_for("sgl_kernel::fwd")
    assert apply_rule(bound, rule) == ["scheduler_metadata"]
    inputs = build_inputs(bound, Target("cpu", "cpu"), {})
    made: list[Any] = []
    library = SimpleNamespace(get_scheduler_metadata=lambda *given: made.extend(given) or "metadata")
    monkeypatch.setattr(torch.ops, "sgl_kernel", library, raising=False)
    assert rule.rebuild_args(bound, inputs) == {"scheduler_metadata": "metadata"}
    assert made[:8] == [2, 1, 100, 32, 8, 128, 128, torch.bfloat16] and made[8].tolist() == [100, 5]
    assert made[14:] == [16, 0, True, -1, -1, 0, False, 0, None, 0], "in the order of get_scheduler_metadata's schema"


def test_attention_whose_operator_cannot_be_replaced_says_why(vllm: Callable[..., Any]):
    def why(operator: str, **arguments: Any) -> Any:
        return kernel_of(operator, **arguments).engine_form

    table = {**llama(), "q": meta(40, 32, 128), "out": meta(40, 32, 128), "max_seqlen_q": 9}
    assert why("_vllm_fa3_C::fwd", **table) == "prefill: hardly a batch has the sizes of another"
    ragged = {**table, "page_table": None, "seqused_k": None, "cu_seqlens_k": meta(17, dtype=torch.int32)}
    flat = {"k": meta(40, 8, 128), "v": meta(40, 8, 128)}
    assert str(why("_vllm_fa3_C::fwd", **{**ragged, **flat})).startswith("prefill")
    assert str(why("_vllm_fa3_C::fwd", **llama(), s_aux=meta(32))).startswith("sinks")
    assert str(why("sgl_kernel::fwd", **llama())).startswith("what it returns")
    latent = {"q": meta(16, 32, 64), "k": meta(9, 16, 1, 64), "v": meta(9, 16, 1, 512), "q_v": meta(16, 32, 512)}
    assert str(why("_vllm_fa3_C::fwd", **{**llama(), **latent})).startswith("latent attention")
    requests = batch([1, 1], [90, 64], 32)
    assert "AMX" in why("_C::cpu_attention_with_kv_cache", **on_cpu(requests, torch.bfloat16))
    engine_form(kernel_of("_C::cpu_attention_with_kv_cache", **on_cpu(requests, torch.float32)))


def test_names_and_axes_of_llama_are_flashinfers():
    arguments = llama()
    decode = checked(kernel_of("_vllm_fa3_C::fwd", **arguments))
    assert decode.name == "gqa_paged_decode_h32_kv8_d128_ps16"
    assert " ".join(decode.inputs) == "q k_cache v_cache kv_indptr kv_indices kv_last_page_len sm_scale"
    assert decode.const_axes == {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16}
    assert set(decode.var_axes) == {"batch_size", "num_pages", "len_indptr", "num_kv_indices"}
    prefill = checked(kernel_of("_vllm_fa3_C::fwd", **{**arguments, "max_seqlen_q": 9}))
    assert prefill.name == "gqa_paged_prefill_causal_h32_kv8_d128_ps16"
    assert list(prefill.inputs)[3] == "qo_indptr" and "total_q" in prefill.var_axes
    capped = kernel_of("_vllm_fa3_C::fwd", **{**arguments, "softcap": 30.0})
    assert capped.name == "gqa_paged_decode_softcap30_h32_kv8_d128_ps16"
    for name in ("q_v", "k_new", "leftpad_k", "rotary_cos", "cp_tot_seqused_k"):
        assert declined("_vllm_fa3_C::fwd", **{**arguments, name: meta(32)}), name
    assert declined("_vllm_fa3_C::fwd", **{**arguments, "k": meta(57056, 16, 8, 128, dtype=torch.float8_e4m3fn)})
    quantized = {name: arguments[name].to(torch.float8_e4m3fn) for name in ("q", "k", "v")}
    assert declined("_vllm_fa3_C::fwd", **{**arguments, **quantized}), "q_descale, k_descale and v_descale count"
    assert declined("_vllm_fa3_C::fwd", **{**arguments, "cp_world_size": 2})


def planned(requests: Batch, layout: str, names: tuple[str, ...], page_size: int = 16, **more: Any) -> Arguments:
    """Arguments of FlashInfer's wrappers as the tap records them, its indices in a buffer with room to spare."""
    counts = [-(-n // page_size) for n in requests.lengths]
    cache = randn(requests.pages, 2, page_size, KV_HEADS, DIM)
    pages = torch.cat([requests.table[row, :count] for row, count in enumerate(counts)])
    last = torch.tensor([(n - 1) % page_size + 1 for n in requests.lengths], dtype=torch.int32)
    indices = torch.cat([pages, torch.full((3,), -1, dtype=torch.int32)])
    return {
        "q": randn(requests.tokens, HEADS, DIM, seed=3),
        "paged_kv_cache": cache if layout == "NHD" else cache.transpose(2, 3),
        "return_lse": True,
        "plan.sm_scale": None,
        "init.kv_layout": layout,
        **dict(zip(names, (starts(counts), indices, last), strict=True)),
        **more,
    }


DECODE = ("plan.indptr", "plan.indices", "plan.last_page_len")
PREFILL = ("plan.paged_kv_indptr", "plan.paged_kv_indices", "plan.paged_kv_last_page_len")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_flashinfers_wrappers(layout: str):
    def run(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cache = arguments["paged_kv_cache"]
        k, v = (cache if layout == "NHD" else cache.transpose(2, 3)).unbind(1)
        q = arguments["q"]
        call_arguments = {"window_size_left": -1, "softmax_scale": DIM**-0.5, "is_causal": True}
        out, lse = flash_attention(requests)(q, k, v, torch.empty_like(q), **call_arguments)
        return out, (lse / 0.6931471805599453).T

    requests = batch([1, 1, 1], [20, 16, 3], 16)
    kernel = agrees("flashinfer::BatchDecodeWithPagedKVCacheWrapper.run", run, **planned(requests, layout, DECODE))
    assert kernel.name == "gqa_paged_decode_h8_kv2_d64_ps16"
    requests, prefill = batch([4, 1, 3], [20, 16, 3], 16), "flashinfer::BatchPrefillWithPagedKVCacheWrapper.run"
    arguments = planned(requests, layout, PREFILL, **{"plan.qo_indptr": requests.starts, "plan.causal": True})
    assert agrees(prefill, run, **arguments).name == "gqa_paged_prefill_causal_h8_kv2_d64_ps16"
    capped = kernel_of(prefill, **arguments, **{"plan.logits_soft_cap": 30.0})
    assert capped.name == "gqa_paged_prefill_causal_softcap30_h8_kv2_d64_ps16"
    with pytest.raises(Unrecognized, match=r"sinks is set: attention sinks \(a logit"):
        flashinfer_prefill(Invocation(prefill, {**arguments, "sinks": torch.ones(8)}))
    assert declined(prefill.replace("run", "end_forward"), **arguments)


def test_values_that_were_not_sampled_are_refused_only_where_they_are_needed():
    requests = batch([1, 1], [20, 5], 16)
    arguments = flash(requests, torch.bfloat16, 16)
    unknown = {name: arguments[name].to("meta") for name in ("seqused_k", "page_table")}
    kernel = kernel_of("_vllm_fa3_C::fwd", **{**arguments, **unknown})
    with pytest.raises(Unrecognized, match="not sampled"):
        kernel.inputs["kv_indices"].get()


def test_a_decode_whose_sequences_have_not_one_query_each_is_refused():
    requests = batch([2, 0], [20, 5], 16)
    kernel = kernel_of("_vllm_fa3_C::fwd", **{**flash(requests, torch.bfloat16, 16), "max_seqlen_q": 1})
    with pytest.raises(Unrecognized, match="not one query"):
        kernel.inputs["kv_indptr"].get()
    with pytest.raises(Unrecognized, match="not one query"):
        engine_form(kernel).inputs["block_table"].get()

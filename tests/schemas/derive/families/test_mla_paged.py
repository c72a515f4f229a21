"""mla_paged: the reference against vLLM's CPU operator and PyTorch's attention, names, what is declined."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, randn
from paging import Batch, attention, batch, starts, tokens_of

from kcap.replay.rebuild.memory import Target, build_inputs
from kcap.replay.rebuild.rebuild import apply_rule, name_arguments
from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.families import replay_rule_for
from kcap.schemas.recording.records import Argument
from kcap.schemas.recording.values import TensorSpec

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
    assert declined(operator, **{**call_arguments, cache: randn(requests.pages, 64, 2, CKV + KPE)})


def test_flash_mla_of_several_queries_a_sequence():
    """Speculated tokens; the last sequence pads a graph's batch: what the kernel leaves for it is no output."""
    requests = batch([3, 3], [20, 90], 64)
    lengths = torch.nn.functional.pad(requests.seq_lens, (0, 1))

    def run(q: torch.Tensor, kcache: torch.Tensor, softmax_scale: float, **_: Any) -> list[torch.Tensor]:
        out, lse = latent_attention(requests, softmax_scale)(q[:2].flatten(0, 1), kcache[:, :, 0])
        pad = torch.full((1, 3, HEADS, CKV), float("nan"))
        outputs = torch.cat((out.unflatten(0, (2, 3)), pad.to(out.dtype)))
        return [outputs, torch.cat((lse.unflatten(0, (2, 3)), pad[..., 0])).mT]

    kernel = agrees(
        "_flashmla_C::dense_decode_fwd",
        run,
        q=randn(3, 3, HEADS, CKV + KPE, seed=1),
        kcache=randn(requests.pages, 64, 1, CKV + KPE, seed=2),
        head_size_v=CKV,
        seqlens_k=lengths,
        block_table=torch.nn.functional.pad(requests.table, (0, 0, 0, 1)),
        softmax_scale=0.05,
        is_causal=True,
    )
    assert kernel.name == "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64"
    assert kernel.inputs["qo_indptr"].get().tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("named", [True, False])
def test_replay_of_flash_mla_makes_its_schedule(monkeypatch: pytest.MonkeyPatch, named: bool):
    """The metadata of a Sample's lengths comes from a run without any; vLLM 0.22's schema has no names."""
    shapes = {"q": (2, 1, 16, 576), "kcache": (900, 64, 1, 576), "seqlens_k": (2,), "block_table": (2, 8)}
    values: dict[str, Any] = {"q": 0, "kcache": 0, "head_size_v": 512, "seqlens_k": 0, "block_table": 0}
    values |= {"softmax_scale": 0.1, "is_causal": True, "tile_scheduler_metadata": 0, "num_splits": 0, "out": None}
    for place, name in enumerate(values):
        if name in shapes or name in ("tile_scheduler_metadata", "num_splits"):
            dtype = "bfloat16" if name in ("q", "kcache") else "int32"
            values[name] = TensorSpec(shapes.get(name, (4,)), dtype, storage=place)
    names = list(values) if named else [f"_{place}" for place in range(len(values))]
    args = [Argument(name=name, value=value) for name, value in zip(names, values.values(), strict=True)]
    contents = {"3": torch.tensor([100, 5]), "4": torch.tensor([[7, 9] + [0] * 6, [800] + [0] * 7])}
    bound, rule = (
        BoundCall("_flashmla_C::dense_decode_fwd", args, contents),
        replay_rule_for("_flashmla_C::dense_decode_fwd"),
    )
    name_arguments(bound, rule)
    assert apply_rule(bound, rule) == ["tile_scheduler_metadata", "num_splits"]
    assert bound.spec("kcache").shape == (3, 64, 1, 576)
    inputs = build_inputs(bound, Target("cpu", "cpu"), {})

    def run(*arguments: Any) -> list[Any]:
        assert arguments[7:] == (None, None, None) and arguments[3].tolist() == [100, 5]
        return [None, None, "metadata", "splits"]

    monkeypatch.setattr(torch.ops, "_flashmla_C", SimpleNamespace(dense_decode_fwd=run), raising=False)
    assert rule.rebuild_args(bound, inputs) == {"tile_scheduler_metadata": "metadata", "num_splits": "splits"}


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

"""attention_split and its merge: the references against vLLM's Triton kernels, interpreted; the two together are a
decode."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn
from interpreted import Launcher, kernels
from paging import Batch, attention, batch, tokens_of

from kcap.replay.rebuild.rebuild import apply_rule
from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import CostInputs, cost_of_instance
from kcap.schemas.derive.families import cost_function_for, replay_rule_for
from kcap.schemas.recording.records import Argument
from kcap.schemas.recording.values import TensorSpec

GROUPED = "triton::_fwd_grouped_kernel_stage1.s01234567"
MERGE = "triton::_fwd_kernel_stage2.s01234567"
PAGE, SPLITS = 16, 4
Arguments = dict[str, Any]


@pytest.fixture(scope="module")
def launchers() -> dict[str, Launcher]:
    return kernels("vllm", "v1/attention/ops/triton_decode_attention.py")


def arguments(requests: Batch, heads: int, kv: int, dim: int, vo: int, dtype: torch.dtype, **more: Any) -> Arguments:
    """As vLLM passes them; of latent attention the values are the first part of the keys."""
    k = randn(requests.pages, PAGE, kv, dim, dtype=dtype, seed=1)
    return {
        "Q": randn(len(requests.lengths), heads, dim, dtype=dtype, seed=2),
        "K_Buffer": k,
        "V_Buffer": k[..., :vo] if kv == 1 else randn(requests.pages, PAGE, kv, vo, dtype=dtype, seed=3),
        "sm_scale": 0.1,
        "Req_to_tokens": requests.table,
        "B_Seqlen": requests.seq_lens,
        "Att_Out": torch.full((len(requests.lengths), heads, SPLITS, vo + 1), 7.0),
        "k_scale": torch.ones(1),
        "v_scale": torch.ones(1),
        "logit_cap": 0.0,
        "PAGE_SIZE": PAGE,
        "BLOCK_N": 16,
        **more,
    }


def run_split(launcher: Launcher, **call: Any) -> None:
    q, k, v, out = (call[name] for name in ("Q", "K_Buffer", "V_Buffer", "Att_Out"))
    (sequences, heads, dim), kv, vo, latent = q.shape, k.shape[2], v.shape[3], k.shape[2] == 1
    values = {
        **call,
        "stride_req_to_tokens_b": call["Req_to_tokens"].stride(0),
        "stride_qbs": q.stride(0),
        "stride_qh": q.stride(1),
        "stride_buf_kbs": k.stride(1),
        "stride_buf_kh": k.stride(2),
        "stride_buf_vbs": v.stride(1),
        "stride_buf_vh": v.stride(2),
        "stride_buf_kpbs": k.stride(0),
        "stride_buf_vpbs": v.stride(0),
        **{f"stride_mid_o{axis}": stride for axis, stride in zip("bhs", out.stride(), strict=False)},
        "kv_group_num": heads // kv,
        "q_head_num": heads,
        "BLOCK_DV": vo,
        "BLOCK_H": 16,
        "BLOCK_DMODEL": vo if latent else dim,
        "BLOCK_DPE": dim - vo if latent else 0,
        "NUM_KV_SPLITS": SPLITS,
        "Lk": dim,
        "Lv": vo,
        "IS_MLA": latent,
    }
    names = inspect.signature(launcher.kernel.fn).parameters
    blocks = -(-heads // min(16, heads // kv))
    launcher[(sequences, blocks, SPLITS)](**{name: values[name] for name in names})


LENGTHS = [[1], [40, 3, 100], [64, 0, 17]]


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize(("heads", "kv", "dim", "vo"), [(16, 1, 48, 32), (8, 2, 32, 32)])
def test_splits_are_vllms_kernel(launchers: dict[str, Launcher], heads: int, kv: int, dim: int, vo: int, cap: float):
    """Latent attention, and grouped queries; a row of padding between."""
    launcher = launchers["_fwd_grouped_kernel_stage1"]
    for seed, lengths in enumerate(LENGTHS):
        requests = batch([1] * len(lengths), lengths, PAGE, seed)
        dtype = torch.float16 if seed else torch.float32  # sums of bfloat16 are beyond the interpreter
        call = arguments(requests, heads, kv, dim, vo, dtype, logit_cap=cap)
        kernel = agrees(GROUPED, lambda **call: run_split(launcher, **call), **call)
        assert kernel.flops() == 2 * heads * (dim + vo) * sum(lengths)
    words = "_softcap5" if cap else ""
    assert kernel.name == f"attention_split{words}_fp16_h{heads}_kv{kv}_qk{dim}_vo{vo}_ps16_s4"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_merge_is_vllms_kernel(launchers: dict[str, Launcher], dtype: torch.dtype):
    heads, vo = 3, 32

    def run(Mid_O: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, B_Seqlen: torch.Tensor) -> None:
        strides = (*Mid_O.stride()[:3], *o.stride()[:2], lse.stride(0))
        launchers["_fwd_kernel_stage2"][len(o), heads](Mid_O, o, lse, B_Seqlen, *strides, SPLITS, vo, vo)

    for lengths in ([1], [40, 3, 100], [64, 0, 17]):
        call = {
            "Mid_O": randn(len(lengths), heads, SPLITS, vo + 1, dtype=torch.float32, seed=1),
            "o": torch.empty(len(lengths), heads, vo, dtype=dtype),
            "lse": torch.empty(len(lengths), heads, dtype=dtype),
            "B_Seqlen": torch.tensor(lengths, dtype=torch.int32),
        }
        call["Mid_O"][torch.tensor(lengths) < SPLITS, :, -1] = float("nan")  # a part without keys is never written
        kernel = agrees(MERGE, run, **call)
    assert kernel.name.startswith("attention_split_merge") and kernel.name.endswith("_h3_vo32_s4")


def test_both_together_are_a_decode():
    requests = batch([1, 1, 1], [40, 3, 100], PAGE)
    call = arguments(requests, 8, 2, 32, 32, torch.float32)
    split = kernel_of(GROUPED, **call)
    scope: Arguments = {}
    exec(split.reference, scope)
    partial = scope["run"](*(slot.get() for slot in split.inputs.values()))

    def run(o: torch.Tensor, lse: torch.Tensor, **_: Any) -> None:
        for row in range(3):
            keys, values = (tokens_of(call[name], requests, row) for name in ("K_Buffer", "V_Buffer"))
            out, sums = attention(call["Q"][row : row + 1], keys, values, 0.1, True)
            o[row], lse[row] = out[0], sums[:, 0]

    agrees(MERGE, run, Mid_O=partial, o=torch.empty(3, 8, 32), lse=torch.empty(3, 8), B_Seqlen=requests.seq_lens)


def test_names_cost_and_what_is_declined():
    requests = batch([1, 1], [40, 3], PAGE)
    call = arguments(requests, 16, 1, 48, 32, torch.bfloat16)
    kernel = kernel_of(GROUPED, **call)
    definition = checked(kernel)
    assert list(definition.inputs)[:5] == ["q", "k_cache", "v_cache", "block_table", "seq_lens"]
    cost = cost_function_for("attention_split")
    inputs = {name: slot.get() for name, slot in kernel.inputs.items()}
    assert cost is not None
    workload = cost(CostInputs(definition, inputs))
    assert workload.read == 43 * 48 * 2 + 2 * 16 * 48 * 2 and workload.flops == kernel.flops()
    assert workload.flops == cost_of_instance(kernel).flops
    for more in ({"K_Buffer": call["K_Buffer"].to(torch.float8_e4m3fn)}, {"PAGE_SIZE": 64}, {"Req_to_tokens": None}):
        assert declined(GROUPED, **{**call, **more}), more


def test_replay_cuts_the_cache_to_the_pages_in_use():
    """Keys and values are views of one cache, and stay so."""
    cache = TensorSpec((900, PAGE, 1, 48), "bfloat16", storage=1)
    values = {
        "Q": TensorSpec((2, 16, 48), "bfloat16"),
        "K_Buffer": cache,
        "V_Buffer": TensorSpec((900, PAGE, 1, 32), "bfloat16", (PAGE * 48, 48, 48, 1), storage=1),
        "Req_to_tokens": TensorSpec((2, 8), "int32", storage=2),
        "B_Seqlen": TensorSpec((2,), "int32", storage=3),
    }
    bound = BoundCall(GROUPED, [Argument(name=name, value=value) for name, value in values.items()])
    bound.set_content("Req_to_tokens", torch.tensor([[800, 7, 5] + [0] * 5, [9] + [0] * 7]))
    bound.set_content("B_Seqlen", torch.tensor([40, 3]))
    apply_rule(bound, replay_rule_for("triton::_fwd_grouped_kernel_stage1"))
    assert bound.spec("K_Buffer").shape == (4, PAGE, 1, 48) and bound.spec("V_Buffer").shape == (4, PAGE, 1, 32)
    assert bound.spec("K_Buffer").storage == bound.spec("V_Buffer").storage


@pytest.mark.parametrize("operator", ["_fwd_grouped_kernel_stage1", "_fwd_kernel"])
def test_replay_cuts_the_cache_to_the_slots_in_use(operator):
    """SGLang's kernels list them in a buffer that is longer."""
    cache = TensorSpec((900, 8, 128), "bfloat16", storage=1)
    values = {
        "K_Buffer": cache,
        "V_Buffer": replace(cache, storage=2),
        "Q": TensorSpec((2, 8, 128), "bfloat16"),
        "kv_indptr": TensorSpec((4,), "int32", storage=3),
        "kv_indices": TensorSpec((9,), "int64", storage=4),
    }
    if operator == "_fwd_kernel":
        values["qo_indptr"] = TensorSpec((3,), "int32", storage=5)
    bound = BoundCall(operator, [Argument(name=name, value=value) for name, value in values.items()])
    bound.set_content("kv_indptr", torch.tensor([0, 3, 5, 0], dtype=torch.int32))
    bound.set_content("kv_indices", torch.tensor([800, 7, 5, 7, 899, 3, 3, 3, 3]))
    apply_rule(bound, replay_rule_for(f"triton::{operator}"))
    assert bound.spec("K_Buffer").shape == bound.spec("V_Buffer").shape == (4, 8, 128)
    slots = bound.content("kv_indices")
    assert slots is not None and slots[:5].tolist() == [2, 1, 0, 1, 3] and len(slots) == 9 and int(slots.max()) < 4

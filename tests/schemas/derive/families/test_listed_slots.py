"""SGLang's Triton attention over a list of slots: prefills and both launches of a decode against its own kernels,
interpreted."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, launched, randn
from interpreted import Launcher, kernels

from kcap.bench.check.checker import copy_of, in_float64
from kcap.replay.datasets.inputs import make_inputs
from kcap.schemas.derive.cost import Cost, CostInputs, cost_of_instance
from kcap.schemas.derive.families import cost_function_for
from kcap.schemas.derive.kernel import KernelInstance
from kcap.schemas.flashinfer.definition import RandomInput, ScalarInput, Workload

EXTEND = "triton::_fwd_kernel.s01234567"
SPLIT = "triton::_fwd_grouped_kernel_stage1.s01234567"
UNGROUPED = "triton::_fwd_kernel_stage1.s01234567"
MERGE = "triton::_fwd_kernel_stage2.s01234567"
UNIT, SPLITS, SLOTS = 32, 4, 400
Arguments = dict[str, Any]


@pytest.fixture(scope="module")
def launchers() -> dict[str, Launcher]:
    files = ("extend_attention.py", "decode_attention.py")
    return kernels("sglang", *(f"kernels/ops/attention/{file}" for file in files))


def slots_of(lengths: list[int], spare: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each sequence's slots begin, and the slots, of which the list has more than it says."""
    starts = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(7))[: sum(lengths) + spare]
    return starts, slots


def caches(kv: int, dim: int, vo: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of latent attention the values are the first part of the keys."""
    k = randn(SLOTS, kv, dim, dtype=dtype, seed=1)
    return k, k[..., :vo] if dim != vo else randn(SLOTS, kv, vo, dtype=dtype, seed=2)


def cost_of(kernel: KernelInstance) -> Cost:
    """By the function of its op_type, which has the Definition's inputs alone."""
    function = cost_function_for(kernel.op_type)
    assert function is not None
    return function(CostInputs(checked(kernel), {name: slot.get() for name, slot in kernel.inputs.items()}))


def strides_of(**tensors: torch.Tensor) -> dict[str, int]:
    """Of the rows and of the heads, by the kernels' names for them."""
    return {
        f"stride_{name}{'h' if axis else 'bs'}": tensor.stride(axis)
        for name, tensor in tensors.items()
        for axis in (0, 1)
    }


def run(launcher: Launcher, grid: tuple[int, ...], call: Arguments, **values: Any) -> None:
    """Launch the kernel with what its parameters take of `call` and `values`, 0 or None for what only others read."""
    parameters = inspect.signature(launcher.kernel.fn).parameters
    unread = {name: 0 for name in parameters if name.startswith("stride_") or name == "compact_batch_size"}
    given = {**unread, **values, **call}
    launcher[grid](**{name: given[name] for name in parameters if name in given})


# What neither case of a test sets
PLAIN_EXTEND = {
    "LSE_Extend": None, "mask_ptr": None, "mask_indptr": None, "window_kv_offset_ptr": None, "xai_temperature_len": -1,
    "USE_CUSTOM_MASK": False, "SKIP_PREFIX_CUSTOM_MASK": True, "STORE_LSE": False, "SKIP_PREFIX": False,
    "SKIP_EXTEND": False, "STORE_TRANSPOSE": False, "USE_COMPACT_TILE_GRID": False, "USE_EXP2": False,
    "USE_FP8_PREFIX": False, "USE_FP8_EXTEND": False, "FP8_MAX": 448.0, "PAGE_SIZE": 1,
}  # fmt: skip


def extension(heads: int, kv: int, dim: int, vo: int, cached: list[int], new: list[int], **more: Any) -> Arguments:
    dtype = more.pop("dtype", torch.float32)
    tokens = sum(new)
    k_buffer, v_buffer = caches(kv, dim, vo, dtype)
    kv_indptr, kv_indices = slots_of(cached)
    return {
        **PLAIN_EXTEND,
        "Q_Extend": randn(tokens, heads, dim, dtype=dtype, seed=3),
        "K_Extend": randn(tokens, kv, dim, dtype=dtype, seed=4),
        "V_Extend": randn(tokens, kv, vo, dtype=dtype, seed=5),
        "O_Extend": torch.full((tokens, heads, vo), 7.0, dtype=dtype),
        "K_Buffer": k_buffer,
        "V_Buffer": v_buffer,
        "qo_indptr": slots_of(new)[0],
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "sink_ptr": None,
        "sm_scale": 0.2,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "SLIDING_WINDOW_SIZE": -1,
        "logit_cap": 0.0,
        "IS_CAUSAL": True,
        "HAS_SINK": more.get("sink_ptr") is not None,
        **more,
    }


def run_extension(launcher: Launcher, **call: Any) -> None:
    q, k, v, out = (call[f"{name}_Extend"] for name in "QKVO")
    (_, heads, dim), kv, vo = q.shape, k.shape[1], v.shape[2]
    latent = dim != vo
    longest = int(call["qo_indptr"].diff().max())
    run(
        launcher,
        (len(call["qo_indptr"]) - 1, heads, -(-longest // 16)),
        call,
        kv_group_num=heads // kv,
        **strides_of(q=q, k=k, v=v, o=out, buf_k=call["K_Buffer"], buf_v=call["V_Buffer"]),
        Lq=dim,
        Lv=vo,
        BLOCK_DMODEL=vo if latent else dim,
        BLOCK_DPE=dim - vo if latent else 0,
        BLOCK_DV=vo,
        BLOCK_M=16,
        BLOCK_N=16,
        BLOCK_N_PREFIX=16,
    )


CASES: list[Arguments] = [
    {},
    {"logit_cap": 5.0},
    {"SLIDING_WINDOW_SIZE": 9, "sink_ptr": randn(8, dtype=torch.float32, seed=6)},
    {"IS_CAUSAL": False},
    {"dtype": torch.float16},
]


@pytest.mark.parametrize("more", CASES, ids=["plain", "softcap", "window and sinks", "not causal", "fp16"])
@pytest.mark.parametrize(("kv", "dim", "vo"), [(2, 32, 32), (1, 48, 32)])
def test_extension_is_sglangs_kernel(launchers: dict[str, Launcher], kv: int, dim: int, vo: int, more: Arguments):
    """Sequences with nothing cached, with more than is new, and with one new token."""
    for cached, new in (([0], [20]), ([40, 0, 33], [3, 17, 1])):
        call = extension(8, kv, dim, vo, cached, new, **more)
        kernel = agrees(EXTEND, lambda **call: run_extension(launchers["_fwd_kernel"], **call), **call)
        if call["IS_CAUSAL"] and call["SLIDING_WINDOW_SIZE"] < 0:
            pairs = sum(n * c + n * (n + 1) // 2 for c, n in zip(cached, new, strict=True))
            assert kernel.flops() == 2 * 8 * (dim + vo) * pairs
    assert kernel.op_type == "attention_extend" and kernel.name.endswith(f"_h8_kv{kv}_qk{dim}_vo{vo}")


def test_an_extension_of_heads_beside_cached_latents_reads_none_of_them(launchers: dict[str, Launcher]):
    """As DeepSeek's first prefill: keys of each head are new, and the cache has one latent for all."""
    call = extension(8, 8, 48, 32, [0, 0, 0], [3, 17, 1])
    latents = randn(SLOTS, 1, 80, dtype=torch.float32, seed=1)
    call |= {"K_Buffer": latents, "V_Buffer": latents[..., :64], "kv_indices": torch.zeros(0, dtype=torch.int64)}
    kernel = agrees(EXTEND, lambda **call: run_extension(launchers["_fwd_kernel"], **call), **call)
    assert kernel.op_type == "mla_ragged" and kernel.name == "mla_ragged_prefill_causal_nolse_fp32_h8_qk48_vo32"
    assert [arg.get().tolist() for arg in (kernel.inputs["qo_indptr"], kernel.inputs["kv_indptr"])] == 2 * [
        [0, 3, 20, 21]
    ]
    assert declined(EXTEND, **call | {"kv_indices": torch.zeros(4, dtype=torch.int64)})


@pytest.mark.parametrize("causal", [False, True])
def test_a_kernel_of_that_name_without_a_cache_is_ragged(causal: bool):
    """As a vision encoder calls it: heads that are no power of two wide, and the end of the last sequence."""
    launcher = kernels("sglang", "kernels/ops/attention/prefill_attention.py")["_fwd_kernel"]

    def attend(**call: Any) -> None:
        q, k, v, out = (call[name] for name in ("Q", "K", "V", "Out"))
        grid = (len(call["B_Seqlen"]), q.shape[1], -(-int(call["B_Seqlen"].max()) // 16))
        sizes = {"kv_group_num": q.shape[1] // k.shape[1], "BLOCK_DMODEL": 32, "Lk": q.shape[2]}
        run(launcher, grid, call, **strides_of(q=q, k=k, v=v, o=out), **sizes, BLOCK_M=16, BLOCK_N=16)

    tokens, lengths = 24, torch.tensor([3, 20, 1], dtype=torch.int32)
    call: Arguments = {
        "Q": randn(tokens, 4, 20, dtype=torch.float32, seed=1),
        "K": randn(tokens, 2, 20, dtype=torch.float32, seed=2),
        "V": randn(tokens, 2, 20, dtype=torch.float32, seed=3),
        "Out": torch.full((tokens, 4, 20), 7.0),
        "B_Seqlen": lengths,
        "B_Start_Loc": torch.tensor([0, 3, 23, 24], dtype=torch.int32),
        "sm_scale": 0.3,
        "IS_CAUSAL": causal,
    }
    kernel = agrees(EXTEND, attend, **call)
    assert kernel.name == f"gqa_ragged_prefill{'_causal' if causal else ''}_nolse_fp32_h4_kv2_d20"
    assert kernel.key == agrees(EXTEND, attend, **call | {"B_Start_Loc": call["B_Start_Loc"][:3]}).key
    assert declined(EXTEND, **call | {"B_Start_Loc": torch.tensor([0, 4, 23])})
    for of_vllm in ({"SLIDING_WINDOW_Q": 0, "SLIDING_WINDOW_K": 0}, {"K_cache": call["K"]}, {"Sinks": None}):
        assert declined(EXTEND, **call | of_vllm), of_vllm


def test_what_an_extension_is_called_and_what_is_declined():
    sinks = randn(8, dtype=torch.float32)
    call = extension(8, 2, 32, 32, [4], [2], SLIDING_WINDOW_SIZE=9, logit_cap=5.0, sink_ptr=sinks)
    kernel = kernel_of(EXTEND, **call)
    assert kernel.name == "attention_extend_causal_window9_softcap5_sinks_fp32_h8_kv2_qk32_vo32"
    assert checked(kernel).inputs.keys() >= {"kv_indptr", "kv_indices", "sinks"}
    constants = ("SLIDING_WINDOW_SIZE", "logit_cap", "IS_CAUSAL", "HAS_SINK", *PLAIN_EXTEND)
    assert launched("triton::_fwd_kernel", call, *constants).key == kernel.key
    cached, new = 4 * 2 * (32 + 32) * 4, 2 * (8 * 32 + 2 * (32 + 32)) * 4
    assert cost_of(kernel) == Cost(cached + new + 2 * 8 * 32 * 4 + 32, cached + new + 32, kernel.flops(), "float32")
    assert cost_of_instance(kernel).bytes == cost_of(kernel).bytes - 32  # the sinks
    for change in (
        {"USE_CUSTOM_MASK": True},
        {"STORE_LSE": True},
        {"SKIP_PREFIX": True},
        {"SKIP_EXTEND": True},
        {"IDENTITY_KV_INDICES": True},
        {"USE_FP8_PREFIX": True},
        {"USE_FP8_EXTEND": True},
        {"PAGE_SIZE": 16},
        {"xai_temperature_len": 100},
        {"SCORE_MOD": "a function"},
        {"k_scale": 0.5},
        {"v_scale": torch.ones(1)},
        {"IS_CAUSAL": False},
        {"K_Buffer": call["K_Buffer"].to(torch.float8_e4m3fn)},
    ):
        assert declined(EXTEND, **{**call, **change}), change
    assert declined("triton::_fwd_kernel.s76543210", Q=call["Q_Extend"], K=call["K_Extend"])


def decode(heads: int, kv: int, dim: int, vo: int, lengths: list[int], splits: list[int], **more: Any) -> Arguments:
    """What a graph passes is longer than its batch."""
    dtype = more.pop("dtype", torch.float32)
    k_buffer, v_buffer = caches(kv, dim, vo, dtype)
    kv_indptr, kv_indices = slots_of(lengths)
    rows = len(lengths) + 2
    return {
        "Q": randn(len(lengths), heads, dim, dtype=dtype, seed=3),
        "K_Buffer": k_buffer,
        "V_Buffer": v_buffer,
        "sm_scale_withk": 0.2,
        "kv_indptr": torch.nn.functional.pad(kv_indptr, (0, 2), value=10**6),
        "kv_indices": kv_indices,
        "Att_Out": torch.full((rows, heads, SPLITS, vo), 7.0),
        "Att_Lse": torch.full((rows, heads, SPLITS), 7.0),
        "num_kv_splits": torch.tensor([*splits, 0, 0], dtype=torch.int32),
        "MIN_BLOCK_KV": UNIT,
        "logit_cap": 0.0,
        "xai_temperature_len": -1,
        "BLOCK_N": 16,
        "HAS_MLA": dim != vo,
        "PAGE_SIZE": 1,
        **more,
    }


def run_split(launcher: Launcher, grid: tuple[int, ...] | None = None, **call: Any) -> None:
    q, out = call["Q"], call["Att_Out"]
    (sequences, heads, dim), kv, vo = q.shape, call["K_Buffer"].shape[1], out.shape[3]
    run(
        launcher,
        grid or (sequences, -(-heads // min(16, heads // kv)), SPLITS),
        call,
        **strides_of(q=q, buf_k=call["K_Buffer"], buf_v=call["V_Buffer"]),
        **{f"stride_mid_o{axis}": out.stride(i) for i, axis in enumerate("bhs")},
        kv_group_num=heads // kv,
        q_head_num=heads,
        BLOCK_DMODEL=vo if dim != vo else dim,
        BLOCK_DPE=dim - vo if dim != vo else 0,
        BLOCK_DV=vo,
        BLOCK_H=16,
        Lk=dim,
        Lv=vo,
    )


BATCHES = [([1], [1]), ([150, 3, 100], [4, 1, 2]), ([64, 0, 33], [2, 0, 4])]


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize(("heads", "kv", "dim", "vo"), [(16, 1, 48, 32), (8, 2, 32, 32)])
def test_splits_are_sglangs_kernel(launchers: dict[str, Launcher], heads: int, kv: int, dim: int, vo: int, cap: float):
    """Latent attention, and grouped queries; a sequence without keys, one in fewer parts than it was given."""
    launcher = launchers["_fwd_grouped_kernel_stage1"]
    for index, (lengths, splits) in enumerate(BATCHES):
        dtype = torch.float16 if index else torch.float32  # sums of bfloat16 are beyond the interpreter
        call = decode(heads, kv, dim, vo, lengths, splits, dtype=dtype, logit_cap=cap)
        kernel = agrees(SPLIT, lambda **call: run_split(launcher, **call), **call)
        assert kernel.flops() == 2 * heads * (dim + vo) * sum(lengths)
    words = "_softcap5" if cap else ""
    assert kernel.name == f"attention_split_listed{words}_fp16_h{heads}_kv{kv}_qk{dim}_vo{vo}_ps1_s4"


@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_splits_of_heads_with_keys_of_their_own_are_sglangs_kernel(launchers: dict[str, Launcher], cap: float):
    """As OPT's. That its products are rounded shows in bfloat16 alone, which is beyond the interpreter."""
    launcher = launchers["_fwd_kernel_stage1"]
    for index, (lengths, splits) in enumerate(BATCHES):
        dtype = torch.float16 if index else torch.float32
        call = decode(4, 4, 32, 32, lengths, splits, dtype=dtype, logit_cap=cap)
        grid = (len(lengths), 4, SPLITS)
        kernel = agrees(UNGROUPED, lambda grid=grid, **call: run_split(launcher, grid, **call), **call)
    assert kernel.name == f"attention_split_listed{'_softcap5' * (cap > 0)}_fp16_h4_kv4_qk32_vo32_ps1_s4"
    assert "v_cache.dtype" not in kernel.reference


def test_of_wider_inputs_nothing_is_rounded_on_the_way():
    """A judge that asks what rounding alone does gets an answer: the kernel's weights may round to a neighbor."""
    call = decode(8, 2, 32, 32, [150, 3], [4, 1], dtype=torch.bfloat16)
    kernel, scope = kernel_of(SPLIT, **call), Arguments()
    exec(kernel.reference, scope)
    inputs = [slot.get() for slot in kernel.inputs.values()]
    rounded, exact = (scope["run"](*(f(one) for one in inputs))[0] for f in (copy_of, in_float64))
    k, v = (call[f"{name}_Buffer"][call["kv_indices"][150:153]].double().repeat_interleave(4, dim=1) for name in "KV")
    weights = torch.softmax(torch.einsum("hd,khd->hk", call["Q"][1].double(), k) * 0.2, dim=-1)
    torch.testing.assert_close(exact[1, :, 0], torch.einsum("hk,khd->hd", weights, v), rtol=1e-5, atol=1e-5)
    assert 1e-4 < (rounded[1, :, 0] - exact[1, :, 0]).abs().max() < 1e-1


def merge(heads: int, vo: int, lengths: list[int], splits: list[int], **more: Any) -> Arguments:
    call = decode(heads, heads, vo, vo, lengths, splits)
    return {
        "Mid_O": randn(*call["Att_Out"].shape, dtype=torch.float32, seed=1),
        "Mid_O_1": randn(*call["Att_Lse"].shape, dtype=torch.float32, seed=2),
        "O": torch.full((len(lengths), heads, vo), 7.0, dtype=more.pop("dtype", torch.float32)),
        "v_scale": 1.0,
        "kv_indptr": call["kv_indptr"],
        "num_kv_splits": call["num_kv_splits"],
        "sink_ptr": None,
        "MAX_KV_SPLITS": SPLITS,
        "MIN_BLOCK_KV": UNIT,
        "HAS_SINK": more.get("sink_ptr") is not None,
        **more,
    }


def run_merge(launcher: Launcher, **call: Any) -> None:
    partial, out = call["Mid_O"], call["O"]
    vo = out.shape[2]
    strides = {f"stride_mid_o{axis}": partial.stride(i) for i, axis in enumerate("bhs")}
    run(launcher, (len(out), out.shape[1]), call, **strides, **strides_of(o=out), BLOCK_DV=vo, Lv=vo)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("more", [{}, {"v_scale": 0.5}, {"sink_ptr": randn(3, dtype=torch.float32, seed=9)}])
def test_merge_is_sglangs_kernel(launchers: dict[str, Launcher], dtype: torch.dtype, more: Arguments):
    for lengths, splits in BATCHES:
        call = merge(3, 32, lengths, splits, dtype=dtype, **more)
        call["Mid_O_1"][0, :, -1] = float("nan") if len(lengths) == 1 else 0.5  # a part without keys is never written
        kernel = agrees(MERGE, lambda **call: run_merge(launchers["_fwd_kernel_stage2"], **call), **call)
    assert kernel.name.startswith("attention_split_merge_listed") and ("sinks" in kernel.name) == ("sink_ptr" in more)


def test_both_launches_together_are_the_attention_of_a_decode():
    lengths = [40, 3, 100]
    call = decode(8, 2, 32, 32, lengths, [2, 1, 4])
    scope: Arguments = {}
    split = kernel_of(SPLIT, **call)
    exec(split.reference, scope)
    partial, lse = scope["run"](*(slot.get() for slot in split.inputs.values()))
    merged = merge(8, 32, lengths, [2, 1, 4], Mid_O=partial, Mid_O_1=lse)

    def attend(**merged: Any) -> None:
        for row, (start, length) in enumerate(zip(call["kv_indptr"], lengths, strict=False)):
            slots = call["kv_indices"][start : start + length]
            k, v = (call[f"{name}_Buffer"][slots].repeat_interleave(4, dim=1) for name in "KV")
            weights = torch.softmax(torch.einsum("hd,khd->hk", call["Q"][row], k) * 0.2, dim=-1)
            merged["O"][row] = torch.einsum("hk,khd->hd", weights, v)

    agrees(MERGE, attend, **merged)


def test_cost_constants_and_what_is_declined_of_a_decode():
    call = decode(8, 2, 32, 32, [40, 3], [2, 1])
    kernel = kernel_of(SPLIT, **call)
    constants = ("MIN_BLOCK_KV", "logit_cap", "xai_temperature_len", "BLOCK_N", "HAS_MLA", "PAGE_SIZE")
    assert launched("triton::_fwd_grouped_kernel_stage1", call, *constants).key == kernel.key
    read, written = 43 * 2 * (32 + 32) * 4 + 2 * 8 * 32 * 4, 2 * 8 * (32 + 1) * 4
    assert cost_of(kernel) == Cost(read + written, read, kernel.flops(), "float32")
    assert cost_of_instance(kernel).bytes == read + written
    shared = {**call, "kv_indices": torch.tensor([*range(40), 0, 1, 2])}
    assert cost_of(kernel_of(SPLIT, **shared)).read == read - 3 * 2 * (32 + 32) * 4, "what two sequences share, once"
    latent = cost_of(kernel_of(SPLIT, **decode(16, 1, 48, 32, [40, 3], [2, 1])))
    assert latent.read == 43 * 48 * 4 + 2 * 16 * 48 * 4, "values are a part of the keys"
    merged = kernel_of(MERGE, **merge(8, 32, [40, 3], [2, 1]))
    assert cost_of(merged).bytes == cost_of_instance(merged).bytes == 2 * 8 * 32 * 4
    for change in (
        {"USE_FORCED": True},
        {"SCORE_MOD": "a function"},
        {"PAGE_SIZE": 16},
        {"xai_temperature_len": 100},
        {"sm_scale_withk": torch.ones(1)},
        {"K_Buffer": call["K_Buffer"].half()},
    ):
        assert declined(SPLIT, **{**call, **change}), change
    merged = merge(8, 32, [40, 3], [2, 1])
    assert launched("triton::_fwd_kernel_stage2", merged, "MAX_KV_SPLITS", "MIN_BLOCK_KV", "HAS_SINK").key == (
        kernel_of(MERGE, **merged).key
    )
    for change in ({"FORCED_KV_SPLITS": 2}, {"v_scale": torch.ones(1)}, {"O": merged["O"].to(torch.int8)}):
        assert declined(MERGE, **{**merged, **change}), change


def test_valid_inputs_are_of_the_cache_and_in_parts_that_there_is_room_for(launchers: dict[str, Launcher]):
    """The kernel runs on them, and writes each part that the merge's own inputs would read."""
    sizes = {"batch_size": 3, "len_indptr": 4, "num_pages": 99, "num_kv_indices": 90}
    kernel = kernel_of(SPLIT, **decode(8, 2, 32, 32, [40, 3], [2, 1]))
    made = drawn(kernel, sizes)
    assert 1 <= made["num_kv_splits"].min() <= made["num_kv_splits"].max() <= SPLITS
    assert made["kv_indptr"][[0, -1]].tolist() == [0, 90] and made["kv_indices"].max() < len(made["k_cache"])
    scope: Arguments = {}
    exec(kernel.reference, scope)
    assert not scope["run"](**made)[0].isnan().any()
    merged = drawn(kernel_of(MERGE, **merge(8, 32, [40, 3], [2, 1])), {"batch_size": 3, "len_indptr": 4})
    assert 1 <= merged["num_kv_splits"].min() <= merged["num_kv_splits"].max() <= SPLITS
    new = kernel_of(EXTEND, **extension(8, 2, 32, 32, [4, 9], [2, 1]))
    drawn_new = drawn(new, {"total_q": 50, "len_indptr": 4, "num_pages": 99, "num_kv_indices": 90})
    exec(new.reference, scope)
    assert not scope["run"](**drawn_new).isnan().any()


def drawn(kernel: KernelInstance, axes: dict[str, int]) -> Arguments:
    definition = checked(kernel)
    inputs = {name: RandomInput() for name, tensor in definition.inputs.items() if tensor.shape is not None}
    scalars = {name: ScalarInput(value=1.0) for name, tensor in definition.inputs.items() if tensor.shape is None}
    workload = Workload(axes=axes, inputs={**inputs, **scalars}, uuid="0")
    return dict(zip(definition.inputs, make_inputs(definition, workload, None).inputs, strict=True))

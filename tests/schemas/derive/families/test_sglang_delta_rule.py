"""The gated delta rule's references against the Triton kernels that SGLang runs for Qwen3-Next, interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, declined, kernel_of, randn
from interpreted import Launcher, kernels
from test_chunked_delta_rule import (
    CHUNKS,
    DTYPES,
    HV,
    KKT,
    LENGTHS,
    OUTPUT,
    STATE,
    TOKENS,
    Arguments,
    K,
    V,
    chunk_indices,
    gate,
    keys,
    kkt,
    output,
    rates,
    runs,
    sequences,
    starts,
    state,
)
from test_delta_rule_inputs import GATING, gating
from test_gated_delta_rule import PACKED, decoding, packed

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import CostInputs, cost_of_instance
from kcap.schemas.derive.families import cost_function_for, replay_rule_for
from kcap.schemas.derive.invocation import Unrecognized
from kcap.schemas.recording.records import Argument
from kcap.schemas.recording.values import TensorSpec, Value

FLA = "kernels/ops/attention/fla/"


@pytest.fixture(scope="module")
def sglang() -> dict[str, Launcher]:
    files = (f"{FLA}{name}.py" for name in ("op", "chunk_delta_h", "chunk_o", "fused_recurrent"))
    return kernels("sglang", *files, "kernels/ops/attention/linear/fused_gdn_gating.py")


@DTYPES
def test_packed_decode_rounds_its_rate(sglang: dict[str, Launcher], dtype: torch.dtype) -> None:
    kernel = sglang["fused_recurrent_gated_delta_rule_packed_decode_kernel"]
    instance = agrees(PACKED, decoding(kernel), **packed([3, -1, 1], dtype, SPLIT_BATCH_HEAD_GRID=None))
    assert ("_rounded" in instance.name) == (dtype == torch.bfloat16)


@DTYPES
def test_gates_round_their_rate(sglang: dict[str, Launcher], dtype: torch.dtype) -> None:
    """The rate is float32, but of `b` it has the precision."""
    rows, kernel = 19, sglang["fused_gdn_gating_kernel"]

    def run(**call: Any) -> None:
        kernel[(rows, 1, 1)](**call, seq_len=1, NUM_HEADS=HV, BLK_HEADS=8)

    rate = torch.full((1, rows, HV), 7.0)
    instance = agrees(GATING, run, **gating(dtype, beta_output=rate, stride_a=HV, stride_b=HV))
    assert instance.name == ("gdn_gating_rounded_ratefp32_v4" if dtype == torch.bfloat16 else "gdn_gating_fp32_v4")


def test_rates_of_other_kernels_are_not_rounded() -> None:
    """Olmo's kernel, and vLLM's without strides, write the rate as it is."""
    rate = torch.full((1, 19, HV), 7.0)
    for operator in (GATING, GATING.replace("gdn", "olmo_hybrid_gdn")):
        assert "rounded" not in kernel_of(operator, **gating(beta_output=rate)).name
    assert "rounded" not in kernel_of(PACKED, **packed([3], SPLIT_BATCH_HEAD_GRID=False)).name


def pooled(dtype: torch.dtype = torch.bfloat16, slots: tuple[int, ...] = (4, 2, -1, 7), **more: Any) -> Arguments:
    call = state(dtype, **more)
    call |= {"initial_state": randn(9, HV, V, K, dtype=torch.float32, seed=9), "USE_INITIAL_STATE": True}
    call |= {"initial_state_indices": torch.tensor(slots, dtype=torch.int32), "INPLACE_UPDATE": True}
    call |= {"stride_init_state": HV * V * K}  # which 0.5.15's kernel has not
    return {name: value for name, value in {**call, **more}.items() if name not in ("h0", "ht")}


def passing(kernel: Launcher) -> Any:
    def run(**call: Any) -> None:
        fixed = {"TRACK_STATE": False, "NT_BUCKET": 0, "BV": V}
        tracked = dict.fromkeys(("track_state", "track_chunk_idx")) | {"stride_track_state": 0}
        runs(kernel, (1, len(LENGTHS) * HV), **fixed, **tracked)(**call)

    return run


@DTYPES
@pytest.mark.parametrize("decays", [True, False])
def test_states_of_a_pool_are_the_kernels(sglang: dict[str, Launcher], dtype: torch.dtype, decays: bool) -> None:
    """The third sequence is padding, the second has no tokens: its state stays, and so do those of no sequence."""
    call = pooled(dtype, **({} if decays else {"g": None}))
    before = call["initial_state"].clone()
    instance = agrees(STATE, passing(sglang["chunk_gated_delta_rule_fwd_kernel_h_blockdim64"]), **call)
    after = instance.outputs["new_state"].get()
    changed = (after != before).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert changed == [4, 7]
    assert instance.name.startswith("gdn_chunk_state_pool")


def test_states_of_a_pool_cost_what_their_sequences_have() -> None:
    instance = kernel_of(STATE, **pooled())
    cost, one = cost_of_instance(instance), 4 * HV * V * K
    inputs = {name: arg.get() for name, arg in instance.inputs.items()}
    function = cost_function_for("gdn_chunk_state")
    assert function is not None and function(CostInputs(instance.definition(), inputs)).bytes == cost.bytes
    whole = kernel_of(STATE, **state(torch.bfloat16))
    padding = 2 * one
    assert cost.bytes == cost_of_instance(whole).bytes + 4 * len(LENGTHS) - padding, "the same, and the states' numbers"
    assert instance.flops() == 4 * TOKENS * HV * V * K


def test_a_kernel_that_does_not_ask_for_padding_has_none() -> None:
    """0.5.15's: it would read and write the memory before the pool."""
    instance = kernel_of(STATE, **pooled(slots=(4, 2, 1, 7), stride_init_state=None))
    assert instance.inputs["state_indices"].get().tolist() == [4, 2, 1, 7]
    call = pooled(stride_init_state=None)
    with pytest.raises(Unrecognized, match="padding has no state"):
        kernel_of(STATE, **call).inputs["state_indices"].get()
    with pytest.raises(Skip, match="before the pool"):
        bound_call(STATE, call, initial_state_indices=call["initial_state_indices"])


def test_states_of_a_pool_that_are_declined() -> None:
    for name, value in {"INPLACE_UPDATE": False, "USE_INITIAL_STATE": False, "TRACK_STATE": True}.items():
        assert declined(STATE, **pooled(**{name: value})), name


@DTYPES
def test_output_is_the_kernels(sglang: dict[str, Launcher], dtype: torch.dtype) -> None:
    agrees(OUTPUT, runs(sglang["chunk_fwd_kernel_o"], (1, CHUNKS, HV), BK=K, BV=V), **output(dtype))


KKT_INVERSE = "triton::chunk_gated_delta_rule_fwd_kkt_solve_kernel.s01234567"


def kkt_inverse(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    """The kernel has chunks of 64 tokens, in four blocks."""
    out = torch.zeros(1, TOKENS, HV, 64, dtype=dtype)
    call = {"k": keys(dtype), "g": gate(), "beta": rates(torch.float32), "A": out, **sequences(64), "BT": 64}
    return {**call, **more}


@DTYPES
@pytest.mark.parametrize("decays", [True, False])
def test_inverse_of_products_is_the_kernels(dtype: torch.dtype, decays: bool) -> None:
    """Of chunks of one to four blocks, the last of which is not full."""
    head = '_MERGE_DOT_PRECISION = tl.constexpr("ieee")\n'
    files = (f"{FLA}{name}.py" for name in ("op", "chunk_fwd"))
    kernel = kernels("sglang", *files, head=head)["chunk_gated_delta_rule_fwd_kkt_solve_kernel"]
    lengths = [19, 0, 70, 33]
    chunks = torch.tensor([[0, 0], [2, 0], [2, 1], [3, 0]], dtype=torch.int32)
    total = sum(lengths)
    key = torch.nn.functional.normalize(randn(1, total, H, K, dtype=torch.float32, seed=1), dim=-1).to(dtype)
    logs = -randn(1, total, HV, dtype=torch.float32, seed=2).exp() / 8
    parts = [part.cumsum(1) for row in logs.split(lengths, 1) for part in row.split(64, 1)]
    call = kkt_inverse(
        dtype,
        k=key,
        g=torch.cat(parts, dim=1) if decays else None,
        beta=randn(1, total, HV, dtype=torch.float32, seed=3).sigmoid(),
        A=torch.zeros(1, total, HV, 64, dtype=dtype),
        cu_seqlens=starts(lengths),
        chunk_indices=chunks,
    )
    instance = agrees(KKT_INVERSE, runs(kernel, (4, HV), BC=16, BK=K), **call)
    words = ("" if decays else "_nogate") + ("_fp32" if dtype == torch.float32 else "")
    assert instance.name == f"gdn_chunk_kkt_inverse{words}_qk2_v4_k16_c64"
    assert instance.outputs["inverse"].get()[0, 0].tolist() == [1.0] + [0.0] * 63
    pairs = sum(n * (n - 1) // 2 for n in (19, 64, 6, 33))
    assert instance.flops() == 2 * pairs * H * K + sum(n**3 for n in (19, 64, 6, 33)) * HV // 3


@pytest.mark.parametrize(("operator", "call"), [(KKT_INVERSE, kkt_inverse()), (KKT, kkt(BT=64))])
def test_replayed_keys_keep_products_and_their_inverse_small(operator: str, call: Arguments) -> None:
    made = bound_call(operator, call, cu_seqlens=starts(LENGTHS), chunk_indices=chunk_indices(64))
    key, rate, sums = (made.content(name) for name in ("k", "beta", "g"))
    assert key is not None and key.norm(dim=-1).sub(1).abs().max() < 1e-5
    assert rate is not None and rate.min() >= 0 and rate.max() <= 1
    assert sums is not None and sums[0, :19].diff(dim=0).max() <= 0


PROJ, H = "kernels/ops/attention/triton_gdn_fused_proj.py", 2
SPLIT_PROJECTIONS, SPLIT_CONTIGUOUS, SPLIT_QKV = (
    f"triton::fused_{name}_kernel.s01234567"
    for name in ("qkvzba_split_reshape_cat", "qkvzba_split_reshape_cat_contiguous", "qkv_split_gdn_prefill")
)


def projected(dtype: torch.dtype = torch.bfloat16, gates: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    call = {
        "mixed_qkvz": randn(TOKENS, 2 * (H * K + HV * V), dtype=dtype),
        "mixed_ba": randn(TOKENS, 2 * HV, dtype=gates, seed=1),
        "mixed_qkv": torch.full((TOKENS, 2 * H * K + HV * V), 7.0, dtype=dtype),
        "z": torch.full((TOKENS, HV, V), 7.0, dtype=dtype),
        **{name: torch.full((TOKENS, HV), 7.0, dtype=gates) for name in "ba"},
    }
    return {**call, "NUM_HEADS_QK": H, "NUM_HEADS_V": HV, "HEAD_QK": K, "HEAD_V": V, **more}


@DTYPES
@pytest.mark.parametrize(("operator", "word"), [(SPLIT_PROJECTIONS, ""), (SPLIT_CONTIGUOUS, "_contiguous")])
def test_projections_are_taken_apart_as_by_the_kernel(operator: str, word: str, dtype: torch.dtype) -> None:
    kernel = kernels("sglang", PROJ)[operator.split("::")[1].split(".")[0]]
    strides = {"qkvz_row_stride": 2 * (H * K + HV * V), "ba_row_stride": 2 * HV, "V_POW2": True} if word else {}

    def run(**call: Any) -> None:
        kernel[(TOKENS, H)](**call, **strides)

    instance = agrees(operator, run, **projected(dtype))
    words = word + ("" if dtype == torch.bfloat16 else "_fp32_babf16")
    assert instance.name == f"gdn_split_projections{words}_qk2_v4_k16_d16"
    assert cost_of_instance(instance).bytes == 2 * cost_of_instance(instance).read


@DTYPES
def test_queries_keys_and_values_are_split_as_by_the_kernel(dtype: torch.dtype) -> None:
    kernel = kernels("sglang", PROJ)["fused_qkv_split_gdn_prefill_kernel"]
    names = ("q", H, K), ("k", H, K), ("v", HV, V)
    call = {name: torch.full((1, TOKENS, heads, size), 7.0, dtype=dtype) for name, heads, size in names}
    wide = randn(TOKENS, 200, dtype=dtype)

    def run(**call: Any) -> None:
        sizes = {"NUM_Q_HEADS": H, "NUM_K_HEADS": H, "NUM_V_HEADS": HV, "HEAD_Q": K, "HEAD_K": K, "HEAD_V": V}
        kernel[(TOKENS,)](**call, **sizes, MIXED_QKV_STRIDE_T=200, MIXED_QKV_STRIDE_D=1, BLOCK_SIZE=128)

    instance = agrees(SPLIT_QKV, run, **call, mixed_qkv=wide[:, : 2 * H * K + HV * V])
    assert instance.name == f"gdn_split_qkv{'' if dtype == torch.bfloat16 else '_fp32'}_qk2_v4_k16_d16"


def test_splits_that_are_declined() -> None:
    assert declined(SPLIT_PROJECTIONS, **projected(HEAD_V=V // 2))
    assert declined(SPLIT_PROJECTIONS, **projected(b=torch.empty(TOKENS, HV)))


def bound_call(operator: str, call: Arguments, timed: bool = False, **contents: torch.Tensor) -> BoundCall:
    """What replay knows of a launch: the shapes of its tensors, and the values that a Sample holds."""
    values: dict[str, Value] = {}
    for storage, (name, value) in enumerate(call.items()):
        is_tensor = isinstance(value, torch.Tensor)
        dtype = str(value.dtype).removeprefix("torch.") if is_tensor else ""
        values[name] = TensorSpec(tuple(value.shape), dtype, storage=storage) if is_tensor else value
    made = BoundCall(operator, [Argument(name=name, value=value) for name, value in values.items()], timed=timed)
    for name, content in contents.items():
        made.set_content(name, content)
    replay_rule_for(operator.rpartition(".")[0]).prepare(made)
    return made


def test_replayed_gates_fall_along_each_chunk() -> None:
    """Where they rise, SGLang's kernels take no decay, and the reference is off by their exponential."""
    offsets = starts([2, 0, 1, 2])
    sampled = {"cu_seqlens": starts(LENGTHS), "chunk_indices": chunk_indices()}
    for operator, call, contents in (
        (OUTPUT, output(), sampled),
        (STATE, state(), {"cu_seqlens": starts(LENGTHS), "chunk_offsets": offsets}),
    ):
        sums = bound_call(operator, call, **contents).content("g")
        assert sums is not None and sums.shape == gate().shape and sums.max() <= 0
        for part in sums[0].split([16, 3, 5, 16, 16]):
            assert part.diff(dim=0).max() <= 0


def test_a_replayed_pool_has_the_states_of_its_sequences() -> None:
    call = pooled(slots=(800, 20, -1, 7), initial_state=torch.empty(900, HV, V, K, device="meta"))
    contents = {"initial_state_indices": call["initial_state_indices"], "chunk_offsets": starts([2, 0, 1, 2])}
    made = bound_call(STATE, call, cu_seqlens=starts(LENGTHS), **contents)
    slots = made.content("initial_state_indices")
    assert slots is not None and slots.tolist() == [3, 2, -1, 1] and made.spec("initial_state").shape[0] == 4

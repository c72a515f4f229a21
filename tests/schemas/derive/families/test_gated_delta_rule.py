"""gdn: the reference against the Triton kernels that vLLM runs, interpreted; what is declined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn
from interpreted import Launcher, kernels

from kcap.schemas.derive.invocation import Unrecognized

H, HV, K, V = 2, 4, 16, 8
RECURRENT, GATING, PACKED = (
    f"triton::{name}_kernel.s01234567"
    for name in (
        "fused_recurrent_gated_delta_rule_fwd",
        "fused_sigmoid_gating_delta_rule_update",
        "fused_recurrent_gated_delta_rule_packed_decode",
    )
)
Arguments = dict[str, Any]


@pytest.fixture(scope="module")
def found() -> dict[str, Launcher]:
    folder = "third_party/flash_linear_attention/ops/"
    return kernels("vllm", folder + "fused_recurrent.py", folder + "fused_sigmoid_gating.py")


def states(slots: list[int], dtype: torch.dtype = torch.float32) -> Arguments:
    pool = randn(9, HV, V, K, dtype=dtype, seed=9)
    return {"h0": pool, "ht": pool, "ssm_state_indices": torch.tensor(slots, dtype=torch.int32), "scale": K**-0.5}


def projected(rows: int, dtype: torch.dtype) -> Arguments:
    return {
        "A_log": randn(HV, dtype=torch.float32, seed=1),
        "a": randn(rows, HV, dtype=dtype, seed=2),
        "b": randn(rows, HV, dtype=dtype, seed=3),
        "dt_bias": randn(HV, dtype=dtype, seed=4),
    }


def joined(slots: list[int], dtype: torch.dtype, **more: Any) -> Arguments:
    """One token of each sequence, all in one row, as vLLM passes them."""
    rows = len(slots)
    return {
        "q": randn(1, rows, H, K, dtype=dtype, seed=5),
        "k": torch.nn.functional.normalize(randn(1, rows, H, K, dtype=dtype, seed=6), dim=-1),
        "v": randn(1, rows, HV, V, dtype=dtype, seed=7),
        "o": torch.full((1, 1, rows, HV, V), 7.0, dtype=dtype),
        "cu_seqlens": torch.arange(rows + 1, dtype=torch.int32),
        "num_accepted_tokens": None,
        "INPLACE_FINAL_STATE": True,
        "USE_QK_L2NORM_IN_KERNEL": False,
        "IS_KDA": False,
        **states(slots),
        **more,
    }


def gated(slots: list[int], dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    gates = {"g": -randn(1, len(slots), HV, dtype=torch.float32, seed=1).exp(), "IS_BETA_HEADWISE": False}
    return joined(slots, dtype, **gates, beta=randn(1, len(slots), HV, dtype=dtype, seed=2).sigmoid(), **more)


def packed(slots: list[int], dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    rows = len(slots)
    return {
        "mixed_qkv": randn(rows, 2 * H * K + HV * V, dtype=dtype, seed=5),
        "o": torch.full((rows, 1, HV, V), 7.0, dtype=dtype),
        "SOFTPLUS_THRESHOLD": 20.0,
        "USE_QK_L2NORM_IN_KERNEL": True,
        "SPLIT_BATCH_HEAD_GRID": False,
        **states(slots),
        **projected(rows, dtype),
        **more,
    }


def stepping(kernel: Launcher) -> Any:
    def run(**call: Any) -> None:
        rows, stride = call["ssm_state_indices"].shape[0], call["h0"].stride(0)
        sizes = {"N": rows, "T": rows, "B": 1, "H": H, "HV": HV, "K": K, "V": V, "BK": K, "BV": V}
        strides = {"stride_init_state_token": stride, "stride_final_state_token": stride, "stride_indices_seq": 1}
        kernel[(1, 1, rows * HV)](**call, **sizes, **strides, stride_indices_tok=1)

    return run


def decoding(kernel: Launcher) -> Any:
    def run(**call: Any) -> None:
        strides = {f"stride_{name}_tok": call[name].stride(0) for name in ("mixed_qkv", "a", "b")}
        strides |= {f"stride_{name}_state_token": call["h0"].stride(0) for name in ("init", "final")}
        fixed = {"H": H, "HV": HV, "K": K, "V": V, "BK": K, "BV": V, "stride_indices_seq": 1}
        kernel[(1, len(call["a"]) * HV)](**call, **strides, **fixed)

    return run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("normed", [False, True])
def test_step_with_gates_is_the_kernels(found: dict[str, Launcher], dtype: torch.dtype, normed: bool) -> None:
    run = stepping(found["fused_recurrent_gated_delta_rule_fwd_kernel"])
    instance = agrees(RECURRENT, run, **gated([3, 8, 1], dtype, USE_QK_L2NORM_IN_KERNEL=normed))
    words = ("_l2norm" if normed else "") + ("" if dtype == torch.bfloat16 else "_fp32")
    assert instance.name == f"gdn_decode_pool_gates{words}_qk2_v4_k16_d8_k_last"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_step_with_projections_is_the_kernels(found: dict[str, Launcher], dtype: torch.dtype) -> None:
    run = stepping(found["fused_sigmoid_gating_delta_rule_update_kernel"])
    call = joined([3, 8, 1], dtype, **projected(3, dtype), beta=1.0, threshold=20.0)
    assert "_gates" not in agrees(GATING, run, **call).name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_decode_is_the_kernels(found: dict[str, Launcher], dtype: torch.dtype) -> None:
    run = decoding(found["fused_recurrent_gated_delta_rule_packed_decode_kernel"])
    instance = agrees(PACKED, run, **packed([3, 8, 1], dtype))
    assert checked(instance).var_axes == ["pool_size", "batch_size"]


def test_states_in_bfloat16(found: dict[str, Launcher]) -> None:
    run = decoding(found["fused_recurrent_gated_delta_rule_packed_decode_kernel"])
    instance = agrees(PACKED, run, **packed([3, 8, 1], **states([3, 8, 1], torch.bfloat16)))
    assert "_statebf16_" in instance.name


@pytest.mark.parametrize("padding", [0, -1])
def test_padding_is_zero_and_keeps_its_state(found: dict[str, Launcher], padding: int) -> None:
    run = decoding(found["fused_recurrent_gated_delta_rule_packed_decode_kernel"])
    instance = agrees(PACKED, run, **packed([3, padding, 5, padding]))
    assert instance.outputs["output"].get()[[1, 3]].abs().max() == 0
    assert instance.flops() == 2 * 8 * HV * V * K
    empty = gated([3, 5, 7, 0], cu_seqlens=torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32))
    instance = agrees(RECURRENT, stepping(found["fused_recurrent_gated_delta_rule_fwd_kernel"]), **empty)
    assert instance.inputs["state_indices"].get().tolist() == [3, 5, 0, 0]


def test_what_is_declined() -> None:
    counts = torch.tensor([1, 1], dtype=torch.int32)
    for name, value in {"num_accepted_tokens": counts, "IS_KDA": True, "INPLACE_FINAL_STATE": False}.items():
        assert declined(RECURRENT, **{**gated([3, 5]), name: value}), name
    assert declined(RECURRENT, **{**gated([3, 5]), "IS_BETA_HEADWISE": True})
    assert declined(RECURRENT, **{**gated([3, 5]), "cu_seqlens": torch.tensor([0, 2])}), "a prefill"
    assert declined(PACKED, **{**packed([3, 5]), "SOFTPLUS_THRESHOLD": 10.0})
    assert declined(GATING, **joined([3], torch.bfloat16, **projected(1, torch.bfloat16), beta=2.0, threshold=20.0))
    uneven = kernel_of(RECURRENT, **gated([3, 5], cu_seqlens=torch.tensor([0, 2, 2], dtype=torch.int32)))
    with pytest.raises(Unrecognized, match="several tokens"):
        uneven.inputs["state_indices"].get()

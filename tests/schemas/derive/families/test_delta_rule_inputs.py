"""gdn_gating, gdn_post_conv, l2norm: the references against the Triton kernels that vLLM runs, interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agrees, declined, kernel_of, randn
from interpreted import Launcher, kernels

from kcap.schemas.derive.cost import cost_of_instance

GATING, OLMO, POST_CONV = (
    f"triton::{name}_kernel.s01234567"
    for name in ("fused_gdn_gating", "fused_olmo_hybrid_gdn_gating", "_fused_post_conv")
)
OPS = "third_party/flash_linear_attention/ops/"
H, HV, K, V, TOKENS = 2, 4, 8, 12, 19
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
Arguments = dict[str, Any]


def projections(dtype: torch.dtype, suffix: str = "") -> Arguments:
    call = {
        "A_log": randn(HV, dtype=torch.float32, seed=1),
        "a": randn(TOKENS, HV, dtype=dtype, seed=2) * 8,
        "b": randn(TOKENS, HV, dtype=dtype, seed=3),
        "dt_bias": randn(HV, dtype=dtype, seed=4),
    }
    return {name + suffix: tensor for name, tensor in call.items()}


def gating(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    g, beta = (torch.full((1, TOKENS, HV), 7.0, dtype=kind) for kind in (torch.float32, dtype))
    return {"g": g, "beta_output": beta, **projections(dtype), "beta": 1.0, "threshold": 20.0, **more}


@DTYPES
@pytest.mark.parametrize("twice", [False, True])
def test_gates_are_vllms(dtype: torch.dtype, twice: bool) -> None:
    """Olmo's kernel without doubled rates is Qwen3-Next's, which vLLM 0.32 no longer has."""
    file = "model_executor/layers/mamba/gdn/olmo_gdn_linear_attn.py"
    kernel = kernels("vllm", file)["fused_olmo_hybrid_gdn_gating_kernel"]

    def run(**call: Any) -> None:
        kernel[(TOKENS, 1, 1)](**call, seq_len=1, NUM_HEADS=HV, BLK_HEADS=8)

    instance = agrees(OLMO, run, **gating(dtype, allow_neg_eigval=twice))
    words = ("_twice" if twice else "") + ("_fp32" if dtype == torch.float32 else "")
    assert instance.name == f"gdn_gating{words}_v4"
    if not twice:
        assert kernel_of(GATING, **gating(dtype)).definition() == instance.definition()


def post_conv(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    sizes = {"q": (H, K), "k": (H, K), "v": (HV, V)}
    return {
        "mixed_qkv_ptr": randn(TOKENS, 2 * H * K + HV * V, dtype=dtype),
        **projections(dtype, "_ptr"),
        **{f"{name}_ptr": torch.full((TOKENS, *size), 7.0, dtype=dtype) for name, size in sizes.items()},
        **{f"{name}_ptr": torch.full((TOKENS, HV), 7.0) for name in ("g", "beta")},
        "APPLY_L2NORM": True,
        "L2NORM_EPS": 1e-6,
        "OUTPUT_G_EXP": False,
        "SOFTPLUS_THRESHOLD": 20.0,
        **more,
    }


@DTYPES
@pytest.mark.parametrize(("normed", "exp"), [(True, False), (False, True)])
def test_split_and_gates_are_vllms(dtype: torch.dtype, normed: bool, exp: bool) -> None:
    kernel = kernels("vllm", OPS + "fused_gdn_prefill_post_conv.py")["_fused_post_conv_kernel"]
    sizes = {"L": TOKENS, "H": H, "HV": HV, "K": K, "V": V, "BLOCK_T": 16, "BK": 8, "BV": 16}

    def run(**call: Any) -> None:
        names = {"x": "mixed_qkv", **{name: name for name in "abqkv"}}
        strides = {f"stride_{name}_tok": call[f"{full}_ptr"].stride(0) for name, full in names.items()}
        kernel[(2, H + HV)](**call, **strides, **sizes)

    instance = agrees(POST_CONV, run, **post_conv(dtype, APPLY_L2NORM=normed, OUTPUT_G_EXP=exp))
    words = ("_l2norm" if normed else "") + ("_exp" if exp else "") + ("_fp32" if dtype == torch.float32 else "")
    assert instance.name == f"gdn_post_conv{words}_qk2_v4_k8_d12"


def norms(kernels_: dict[str, Launcher]) -> dict[str, tuple[str, str, Callable[..., None]]]:
    """By kernel the names of its arguments, and how it is launched."""

    def tiled(**call: Any) -> None:
        kernels_["l2norm_fwd_kernel"][(2,)](**call, NB=1, T=TOKENS, D=K, BT=16, BD=8)

    def by_row(**call: Any) -> None:
        kernels_["l2norm_fwd_kernel1"][(TOKENS,)](**call, D=K, BD=8)

    def masked(**call: Any) -> None:
        kernels_["l2norm_fwd_kernel2"][(2,)](**call, M=TOKENS, N=K, BD=8, MBLOCK=16)

    return {
        "l2norm_fwd_kernel": ("x", "y", tiled),
        "l2norm_fwd_kernel1": ("x", "y", by_row),
        "l2norm_fwd_kernel2": ("X", "Y", masked),
    }


@DTYPES
@pytest.mark.parametrize("name", ["l2norm_fwd_kernel", "l2norm_fwd_kernel1", "l2norm_fwd_kernel2"])
def test_rows_of_length_one_are_the_kernels(name: str, dtype: torch.dtype) -> None:
    x, y, run = norms(kernels("vllm", OPS + "l2norm.py"))[name]
    call = {x: randn(TOKENS, K, dtype=dtype), y: torch.full((TOKENS, K), 7.0, dtype=dtype), "eps": 1e-6}
    assert agrees(f"triton::{name}.s01234567", run, **call).name.endswith("_d8")


def test_what_is_declined() -> None:
    assert declined(GATING, **gating(threshold=10.0)) and declined(GATING, **gating(beta=2.0))
    assert declined(POST_CONV, **post_conv(SOFTPLUS_THRESHOLD=10.0)) and declined(
        POST_CONV, **post_conv(OUTPUT_G_EXP=None)
    )
    assert declined(POST_CONV, **post_conv(q_ptr=torch.empty(TOKENS, H, K)))


def test_costs_count_each_tensor_once() -> None:
    cost = cost_of_instance(kernel_of(POST_CONV, **post_conv()))
    width = 2 * H * K + HV * V
    assert cost.read == 2 * TOKENS * (width + 2 * HV) + (4 + 2) * HV
    assert cost.bytes == cost.read + TOKENS * (2 * width + 8 * HV)
    assert cost_of_instance(kernel_of(GATING, **gating())).bytes == TOKENS * HV * (2 + 2 + 4 + 2) + 6 * HV

"""moe_router: the reference against SGLang's Triton kernels, interpreted; names, cost, what is declined, replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, launched, randn
from interpreted import Launcher, kernels

from kcap.schemas.derive.bound_call import BoundCall, replay_rule_for
from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function_for
from kcap.schemas.recording.records import Argument
from kcap.schemas.recording.values import TensorSpec

CUDACORE, TENSORCORE = (f"triton::fused_moe_router_{kind}_kernel" for kind in ("cudacore", "tensorcore"))


@pytest.fixture(scope="module")
def found() -> dict[str, Launcher]:
    return kernels("sglang", "kernels/ops/moe/router.py")


def shared(tokens: int, experts: int, k: int, cap: float, bias: bool) -> dict[str, Any]:
    return {
        "topk_weights_ptr": torch.full((tokens, k), 7.0),
        "topk_ids_ptr": torch.full((tokens, k), 7, dtype=torch.int32),
        "correction_bias_ptr": randn(experts, dtype=torch.float32, seed=2) if bias else None,
        "is_correction_bias": bias,
        "num_experts": experts,
        "topk": k,
        "moe_softcapping": cap,
        "moe_renormalize": False,
    }


def cudacore(
    tokens: int = 5, k: int = 2, cap: float = 0, bias: bool = False, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """The arguments of the kernel for few tokens, as SGLang 0.5.23 passes them; 8 experts."""
    tensors = {"input_ptr": randn(tokens, 48, dtype=dtype), "moe_router_weight_ptr": randn(8, 48, dtype=dtype, seed=1)}
    return {**tensors, **shared(tokens, 8, k, cap, bias), "hidden_dim": 48, "BLOCK_SIZE": 64}


def tensorcore(
    tokens: int = 5, k: int = 2, cap: float = 0, bias: bool = False, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """The arguments of the kernel for more, 12 experts."""
    tensors = {"a_ptr": randn(tokens, 64, dtype=dtype), "b_ptr": randn(12, 64, dtype=dtype, seed=1)}
    sizes = {"bs": tokens, "K": 64, "BLOCK_SIZE_M": 4, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 32}
    strides = {"stride_am": 64, "stride_bn": 64, "dp_attn_workaround_flag": False}
    return {**tensors, **shared(tokens, 12, k, cap, bias), **sizes, **strides}


@pytest.mark.parametrize(
    ("k", "cap", "bias", "word"),
    [(1, 0, False, ""), (2, 5.0, False, "_cap5"), (2, 5.0, True, "_cap5"), (4, 0, True, ""), (5, 5.0, False, "_cap5")],
)
def test_reference_is_sglangs_kernel(found: dict[str, Launcher], k: int, cap: float, bias: bool, word: str):
    word = f"{'_bias' if bias else ''}{{}}{word}_topk{k}"
    few = found["fused_moe_router_cudacore_kernel"]
    for dtype, name in ((torch.bfloat16, ""), (torch.float32, "_fp32")):
        kernel = agrees(f"{CUDACORE}.s0123", lambda **a: few[5,](**a), **cudacore(5, k, cap, bias, dtype))
        assert kernel.name == f"moe_router{word.format(name)}_e8_h48"
    more = found["fused_moe_router_tensorcore_kernel"]
    if k <= 2:
        kernel = agrees(f"{TENSORCORE}.s0123", lambda **a: more[2,](**a), **tensorcore(5, k, cap, bias))
        assert kernel.name == f"moe_router{word.format('')}_e12_h64"


def test_of_equal_experts_the_first_are_chosen(found: dict[str, Launcher]):
    few, more = cudacore(k=4), tensorcore()
    few["moe_router_weight_ptr"] = few["moe_router_weight_ptr"][:2].repeat(4, 1)
    more["b_ptr"] = more["b_ptr"][:3].repeat(4, 1)
    agrees(CUDACORE, lambda **a: found["fused_moe_router_cudacore_kernel"][5,](**a), **few)
    agrees(TENSORCORE, lambda **a: found["fused_moe_router_tensorcore_kernel"][2,](**a), **more)


def test_definition_and_cost():
    kernel = kernel_of(CUDACORE, **cudacore(bias=True))
    definition = checked(kernel)
    assert definition.var_axes == ["seq_len"]
    assert {name: t.dtype for name, t in definition.outputs.items()} == {"topk_weights": "float32", "topk_ids": "int32"}
    count = cost_function_for("moe_router")
    assert count is not None
    cost = count(CostInputs(definition, {name: arg.get() for name, arg in kernel.inputs.items()}))
    assert cost.flops == kernel.flops == 2 * 5 * 8 * 48
    assert cost.bytes == 2 * 48 * (5 + 8) + 4 * 8 + 5 * 2 * 8


def test_launches_are_known_as_they_are_recorded():
    fixed = ("is_correction_bias", "num_experts", "topk", "moe_softcapping", "moe_renormalize")
    few, more = cudacore(cap=5.0, bias=True), tensorcore(cap=5.0)
    assert launched(CUDACORE, few, *fixed, "hidden_dim", "BLOCK_SIZE").key == kernel_of(CUDACORE, **few).key
    sizes = ("K", "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "stride_am", "stride_bn", "dp_attn_workaround_flag")
    assert launched(TENSORCORE, more, *fixed, *sizes).key == kernel_of(TENSORCORE, **more).key


def test_what_is_declined():
    assert declined(TENSORCORE, **tensorcore(dtype=torch.float32))
    assert declined(TENSORCORE, **tensorcore(k=3))
    assert declined(TENSORCORE, **{**tensorcore(), "BLOCK_SIZE_K": 48})
    assert declined(TENSORCORE, **{**tensorcore(), "dp_attn_workaround_flag": True})


def test_replay_needs_no_ids():
    bound = BoundCall(TENSORCORE, [Argument(name="topk_ids_ptr", value=TensorSpec((5, 2), "int32"))])
    replay_rule_for(TENSORCORE).prepare(bound)
    assert bound.contents["0"].shape == (5, 2)

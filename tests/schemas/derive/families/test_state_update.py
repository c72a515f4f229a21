"""mamba_ssu: the reference against vLLM's Triton kernel, interpreted; what is declined; names and cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, randn
from interpreted import kernels

from kcap.schemas.derive.cost import cost_of_instance
from kcap.schemas.derive.invocation import Unrecognized

OPERATOR = "triton::_selective_scan_update_kernel.s01234567"
FOLDER = "model_executor/layers/mamba/ops/"
Arguments = dict[str, Any]


def arguments(
    batch: int, h: int, d: int, s: int, g: int, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> Arguments:
    """As vLLM passes them to Mamba-2's decode: a decay, a time step and a skip for each head, expanded."""
    slots = torch.randperm(batch + 3, generator=torch.Generator().manual_seed(batch))[:batch].to(torch.int32)[:, None]
    return {
        "state_ptr": randn(batch + 3, h, d, s, dtype=dtype),
        "rand_seed_ptr": None,
        "x_ptr": randn(batch, h, d, dtype=dtype, seed=1),
        "dt_ptr": randn(batch, h, 1, dtype=dtype, seed=2).expand(batch, h, d),
        "dt_bias_ptr": randn(h, 1, dtype=torch.float32, seed=3).expand(h, d),
        "A_ptr": -randn(h, 1, 1, dtype=torch.float32, seed=4).exp().expand(h, d, s),
        "B_ptr": randn(batch, g, s, dtype=dtype, seed=5),
        "C_ptr": randn(batch, g, s, dtype=dtype, seed=6),
        "D_ptr": randn(h, 1, dtype=dtype, seed=7).expand(h, d),
        "z_ptr": None,
        "out_ptr": torch.full((batch, h, d), 7.0, dtype=dtype),
        "state_batch_indices_ptr": slots,
        "dst_state_batch_indices_ptr": slots,
        "null_block_id": -1,
        "num_accepted_tokens_ptr": None,
        "cu_seqlens_ptr": None,
        "DT_SOFTPLUS": True,
        "TIE_HDIM": True,
        "USE_RS_ROUNDING": False,
        **more,
    }


@pytest.fixture(scope="module")
def kernel() -> Callable[..., Any]:
    found = kernels("vllm", FOLDER + "triton_helpers.py", FOLDER + "mamba_ssm.py")["_selective_scan_update_kernel"]

    def run(**call: Any) -> None:
        state, x, b = call["state_ptr"], call["x_ptr"], call["B_ptr"]
        (batch, heads, dim), size = x.shape, state.shape[3]

        def strides(name: str, count: int) -> tuple[int, ...]:
            return call[name].stride() if call[name] is not None else (0,) * count

        found[(-(-dim // 4), batch, heads)](
            *(call[name] for name in list(call)[:16]),
            *(batch, heads, dim, size, heads // b.shape[1], *state.stride(), *x.stride(), *call["dt_ptr"].stride()),
            *(*strides("dt_bias_ptr", 2), *call["A_ptr"].stride(), *b.stride(), *call["C_ptr"].stride()),
            *(*strides("D_ptr", 2), *strides("z_ptr", 3), *call["out_ptr"].stride()),
            *(*call["state_batch_indices_ptr"].stride(), *call["dst_state_batch_indices_ptr"].stride()),
            *(call["DT_SOFTPLUS"], call["TIE_HDIM"]),
            BLOCK_SIZE_M=4,
            USE_RS_ROUNDING=False,
            PHILOX_ROUNDS=0,
        )

    return run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "h", "d", "s", "g"), [(1, 2, 8, 16, 1), (3, 4, 6, 16, 2)])
def test_mamba_2_is_vllms_kernel(
    kernel: Callable[..., Any], batch: int, h: int, d: int, s: int, g: int, dtype: torch.dtype
):
    instance = agrees(OPERATOR, kernel, **arguments(batch, h, d, s, g, dtype))
    assert instance.name == f"mamba_ssu_decode{'' if dtype == torch.bfloat16 else '_fp32'}_h{h}_d{d}_s{s}_ng{g}"


def test_mamba_1_is_vllms_kernel(kernel: Callable[..., Any]):
    """One head; every channel and number of the state has a decay of its own, and a gate closes it."""
    own = {
        "dt_ptr": randn(3, 1, 12, seed=2),
        "dt_bias_ptr": randn(1, 12, dtype=torch.float32, seed=3),
        "A_ptr": -randn(1, 12, 16, dtype=torch.float32, seed=4).exp(),
        "z_ptr": randn(3, 1, 12, seed=8),
    }
    instance = agrees(OPERATOR, kernel, **arguments(3, 1, 12, 16, 1, TIE_HDIM=False, **own))
    assert instance.name == "mamba_ssu_decode_z_h1_d12_s16_ng1"


def test_without_what_is_optional(kernel: Callable[..., Any]):
    more = {"D_ptr": None, "dt_bias_ptr": None, "DT_SOFTPLUS": False, "dt_ptr": randn(2, 2, 1).exp().expand(2, 2, 4)}
    instance = agrees(OPERATOR, kernel, **arguments(2, 2, 4, 16, 1, **more))
    assert instance.name == "mamba_ssu_decode_noD_nodt_bias_nosoftplus_h2_d4_s16_ng1"


@pytest.mark.parametrize("padding", [-1, 0])
def test_padding_writes_no_state_and_its_output_is_zero(kernel: Callable[..., Any], padding: int):
    slots = torch.tensor([3, padding, 5, padding], dtype=torch.int32)[:, None]
    named = {"state_batch_indices_ptr": slots, "dst_state_batch_indices_ptr": slots, "null_block_id": padding}
    instance = agrees(OPERATOR, kernel, **arguments(4, 2, 4, 16, 1, **named))
    assert instance.outputs["output"].get()[[1, 3]].abs().max() == 0
    assert instance.flops() == 6 * 2 * 2 * 4 * 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reference_is_vllms_kernel_for_cpus(dtype: torch.dtype):
    load_vllm_kernels()
    slots = torch.tensor([3, 0, 5], dtype=torch.int32)[:, None]
    named = {"state_batch_indices_ptr": slots, "dst_state_batch_indices_ptr": slots, "null_block_id": 0}
    usual = arguments(3, 4, 16, 16, 2, dtype, dt_bias_ptr=randn(4, 1, dtype=dtype).expand(4, 16), **named)
    call = {name.removesuffix("_ptr"): usual[name] for name in usual if name.endswith("_ptr") and name[:4] != "rand"}
    operator = torch.ops._C.selective_state_update_cpu
    instance = agrees("_C::selective_state_update_cpu", operator, **call, dt_softplus=True, null_block_id=0)
    assert instance.name == f"mamba_ssu_decode_pad0{'' if dtype == torch.bfloat16 else '_fp32'}_h4_d16_s16_ng2"


def test_what_is_declined():
    usual = arguments(2, 2, 4, 16, 1)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    assert declined(OPERATOR, **{**usual, "cu_seqlens_ptr": starts})
    assert declined(OPERATOR, **{**usual, "num_accepted_tokens_ptr": starts})
    assert declined(OPERATOR, **{**usual, "USE_RS_ROUNDING": True})
    assert declined(OPERATOR, **{**usual, "state_batch_indices_ptr": None})
    assert declined(OPERATOR, **{name: value for name, value in usual.items() if name != "DT_SOFTPLUS"})
    moved = kernel_of(OPERATOR, **{**usual, "dst_state_batch_indices_ptr": usual["state_batch_indices_ptr"] + 1})
    with pytest.raises(Unrecognized, match="writes another"):
        moved.inputs["state_batch_indices"].get()
    shared = torch.zeros(2, 1, dtype=torch.int32)
    twice = {"state_batch_indices_ptr": shared, "dst_state_batch_indices_ptr": shared}
    with pytest.raises(Unrecognized, match="one state"):
        kernel_of(OPERATOR, **{**usual, **twice}).inputs["state_batch_indices"].get()


def test_name_and_inputs_of_nemotron_are_flashinfers():
    instance = kernel_of(OPERATOR, **arguments(2, 64, 64, 128, 4))
    definition = checked(instance)
    assert definition.name == "mamba_ssu_decode_h64_d64_s128_ng4" and definition.op_type == "mamba_ssu"
    assert " ".join(definition.inputs) == "state x dt A B C D dt_bias state_batch_indices"
    state = 64 * 64 * 128
    assert instance.touched() == 2 * 2 * (2 * state + 2 * 64 * 64 + 64 + 2 * 4 * 128)
    assert cost_of_instance(instance).flops == 2 * 6 * state

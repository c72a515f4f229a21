"""causal_conv1d: both references against vLLM's Triton kernels, interpreted; what is declined.

In float16: the interpreter multiplies no two bfloat16.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, randn
from interpreted import Launcher, kernels
from paging import starts

from kcap.schemas.derive.invocation import Unrecognized

UPDATE, FORWARD = "triton::_causal_conv1d_update_kernel.s01234567", "triton::_causal_conv1d_fwd_kernel.s01234567"
Arguments = dict[str, Any]


@pytest.fixture(scope="module")
def found() -> dict[str, Launcher]:
    return kernels("vllm", "model_executor/layers/mamba/ops/causal_conv1d.py")


def shared(dim: int, width: int, dtype: torch.dtype, silu: bool, bias: bool, padding: int | None) -> Arguments:
    return {
        "w_ptr": randn(dim, width, dtype=dtype, seed=1),
        "bias_ptr": randn(dim, dtype=dtype, seed=2) if bias else None,
        "null_block_id": padding,
        "HAS_NULL_BLOCK": padding is not None,
        "SILU_ACTIVATION": silu,
        "IS_APC_ENABLED": False,
    }


def decode(slots: list[int], dim: int, width: int, dtype: torch.dtype = torch.float16, **more: Any) -> Arguments:
    """One token of each sequence, the output written over the input, as vLLM passes them."""
    x = randn(len(slots), dim, dtype=dtype)[..., None]
    return {
        "x_ptr": x,
        "o_ptr": more.pop("out", x),
        "conv_state_ptr": randn(9, width - 1, dim, dtype=dtype, seed=3).mT,
        "conv_state_indices_ptr": torch.tensor(slots, dtype=torch.int32),
        "num_accepted_tokens_ptr": None,
        "query_start_loc_ptr": None,
        **shared(dim, width, dtype, more.pop("silu", True), more.pop("bias", True), more.pop("padding", None)),
        **more,
    }


def of_prefix_cache(kernel: Launcher) -> dict[str, bool]:
    """The constant of releases before 0.33, which have arguments for a prefix cache, too; here there is none."""
    return {"IS_APC_ENABLED": False} if "IS_APC_ENABLED" in kernel.kernel.arg_names else {}


def updating(kernel: Launcher) -> Any:
    cached = of_prefix_cache(kernel)

    def run(**call: Any) -> None:
        none = (None,) * (4 if cached else 2)
        x, state, width = call["x_ptr"], call["conv_state_ptr"], call["w_ptr"].shape[1]
        kernel[(len(x), 1)](
            *(x, call["w_ptr"], call["bias_ptr"], state, call["conv_state_indices_ptr"], *none, call["o_ptr"]),
            *(len(x), x.shape[1], 1, width - 1, len(state), *x.stride(), *call["w_ptr"].stride(), *state.stride()),
            *(1, *call["o_ptr"].stride(), call["null_block_id"]),
            HAS_BIAS=call["bias_ptr"] is not None,
            KERNEL_WIDTH=width,
            SILU_ACTIVATION=call["SILU_ACTIVATION"],
            IS_VARLEN=False,
            **cached,
            IS_SPEC_DECODING=False,
            NP2_STATELEN=4,
            HAS_NULL_BLOCK=call["HAS_NULL_BLOCK"],
            BLOCK_N=32,
            launch_pdl=False,
        )

    return run


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("silu", "bias", "width"), [(True, True, 4), (False, False, 3), (True, False, 2)])
def test_decode_is_vllms_kernel(found: dict[str, Launcher], dtype: torch.dtype, silu: bool, bias: bool, width: int):
    arguments = decode([3, 8, 1], 20, width, dtype, silu=silu, bias=bias)
    instance = agrees(UPDATE, updating(found["_causal_conv1d_update_kernel"]), **arguments)
    words = ("_silu" if silu else "") + ("" if bias else "_nobias") + ("_fp32" if dtype == torch.float32 else "_fp16")
    assert instance.name == f"causal_conv1d_update{words}_d20_w{width}"


@pytest.mark.parametrize("padding", [-1, 0])
def test_padding_of_a_decode_is_zero(found: dict[str, Launcher], padding: int):
    arguments = decode([3, padding, 1, padding], 20, 4, padding=padding, out=torch.full((4, 20, 1), 7.0).half())
    instance = agrees(UPDATE, updating(found["_causal_conv1d_update_kernel"]), **arguments)
    assert instance.outputs["output"].get()[[1, 3]].abs().max() == 0
    assert instance.touched() == 2 * 2 * (20 + 3 * 20) * 2


@pytest.mark.parametrize(("silu", "bias", "width"), [(True, True, 4), (False, False, 3)])
def test_decode_is_vllms_kernel_for_cpus(silu: bool, bias: bool, width: int):
    """It returns its output."""
    load_vllm_kernels()
    x, state = randn(3, 64), randn(9, width - 1, 64, seed=3).mT
    instance = agrees(
        "_C::causal_conv1d_update_cpu_vec",
        torch.ops._C.causal_conv1d_update_cpu_vec,
        x=x,
        conv_state=state,
        weight=randn(64, width, seed=1),
        bias=randn(64, seed=2) if bias else None,
        activation="silu" if silu else None,
        conv_state_indices=torch.tensor([[3], [0], [8]], dtype=torch.int32),
        query_start_loc=None,
        pad_slot_id=0,
    )
    words = ("_silu" if silu else "") + ("" if bias else "_nobias")
    assert instance.name == f"causal_conv1d_update{words}_pad0_d64_w{width}"


def test_a_table_of_states_is_declined_where_the_kernel_does_not_read_its_first_column():
    call = {"x": randn(2, 64), "weight": randn(64, 4), "conv_state": randn(9, 3, 64).mT, "activation": None}
    table = torch.tensor([[3, 1], [8, 2]], dtype=torch.int32)
    assert declined("_C::causal_conv1d_update_cpu_vec", **call, pad_slot_id=0, conv_state_indices=table)
    kernel_of("_C::causal_conv1d_update_cpu_vec", **call, pad_slot_id=0, conv_state_indices=table[:, 0])


def prefill(counts: list[int], slots: list[int], dtype: torch.dtype = torch.float16, **more: Any) -> Arguments:
    """Sequences of these lengths, every second one with a state already."""
    dim, width = 20, 4
    x = randn(sum(counts), dim, dtype=dtype).mT
    return {
        "x_ptr": x,
        "o_ptr": torch.full_like(x, 7.0),
        "initial_states_ptr": randn(9, width - 1, dim, dtype=dtype, seed=3).mT,
        "cache_indices_ptr": torch.tensor(slots, dtype=torch.int32),
        "has_initial_states_ptr": torch.arange(len(counts)) % 2 == 0,
        "query_start_loc_ptr": starts(counts),
        **shared(dim, width, dtype, True, True, more.pop("padding", None)),
        **more,
    }


def forwarding(kernel: Launcher) -> Any:
    cached = of_prefix_cache(kernel)

    def run(**call: Any) -> None:
        none, page = ((None,) * 4, (1,)) if cached else ((), ())
        x, state, counts = call["x_ptr"], call["initial_states_ptr"], call["query_start_loc_ptr"].diff().tolist()
        chunks = [(row, chunk) for row, count in enumerate(counts) for chunk in range(-(-count // 8))]
        batch, offset = torch.tensor(chunks, dtype=torch.int32).T.contiguous()
        kernel[(len(chunks), 1)](
            *(x, call["w_ptr"], call["bias_ptr"], state, call["cache_indices_ptr"], call["has_initial_states_ptr"]),
            *(call["query_start_loc_ptr"], batch, offset, *none, call["o_ptr"], len(x), len(state)),
            *(*x.stride(), *call["w_ptr"].stride(), *state.stride(), 1, *call["o_ptr"].stride(), *page),
            *(-1, call["null_block_id"]),
            HAS_BIAS=True,
            KERNEL_WIDTH=4,
            SILU_ACTIVATION=True,
            **cached,
            HAS_NULL_BLOCK=call["HAS_NULL_BLOCK"],
            NP2_STATELEN=4,
            BLOCK_M=8,
            BLOCK_N=32,
            launch_pdl=False,
        )

    return run


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("counts", [[1], [20, 1, 2, 3], [2, 17, 8]])
def test_prefill_is_vllms_kernel(found: dict[str, Launcher], dtype: torch.dtype, counts: list[int]):
    arguments = prefill(counts, [4, 2, 7, 5][: len(counts)], dtype)
    agrees(FORWARD, forwarding(found["_causal_conv1d_fwd_kernel"]), **arguments)


def test_padding_of_a_prefill_is_zero(found: dict[str, Launcher]):
    arguments = prefill([9, 2, 4], [4, 0, 7], padding=0)
    instance = agrees(FORWARD, forwarding(found["_causal_conv1d_fwd_kernel"]), **arguments)
    assert instance.name == "causal_conv1d_prefill_silu_pad0_fp16_d20_w4"
    assert instance.outputs["output"].get()[9:11].abs().max() == 0
    definition = checked(instance)
    assert definition.var_axes == ["total_tokens", "state_cache_size", "num_seqs", "len_indptr"]


def test_what_is_declined():
    counted = torch.tensor([1, 2], dtype=torch.int32)
    for name in ("num_accepted_tokens_ptr", "query_start_loc_ptr", "initial_state_idx"):
        assert declined(UPDATE, **{**decode([3, 1], 20, 4), name: counted}), name
    assert declined(UPDATE, **{**decode([3, 1], 20, 4), "IS_APC_ENABLED": True})
    assert declined(UPDATE, **{**decode([3, 1], 20, 4), "SILU_ACTIVATION": None})
    assert declined(UPDATE, **{**decode([3, 1], 20, 4), "HAS_NULL_BLOCK": None})
    assert declined(UPDATE, **{**decode([3, 1], 20, 4), "conv_state_ptr": randn(9, 20, 6)}), "of speculative tokens"
    padded = kernel_of(FORWARD, **{**prefill([3, 1], [1, 2]), "query_start_loc_ptr": starts([2, 1])})
    with pytest.raises(Unrecognized, match="padded"):
        padded.inputs["query_start_loc"].get()
    unknown = kernel_of(FORWARD, **{**prefill([3, 1], [1, 2]), "cache_indices_ptr": counted.to("meta")})
    with pytest.raises(Unrecognized, match="not sampled"):
        unknown.inputs["conv_state_indices"].get()

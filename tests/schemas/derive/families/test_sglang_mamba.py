"""Mamba-2's decode and convolution against SGLang's Triton kernels, interpreted; its kernels in CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, declined, kernel_of, randn
from interpreted import Launcher, kernels
from test_causal_conv1d import FORWARD, UPDATE, decode, prefill
from test_sglang_delta_rule import bound_call
from test_state_update import OPERATOR, arguments

FOLDER = "kernels/ops/mamba/"
SOFTPLUS = """
@triton.jit
def softplus(dt):
    return tl.where(dt <= 20.0, tl.math.log(tl.math.exp(dt) + 1), dt)


"""
Arguments = dict[str, Any]
TOKEN_AXIS = ("x_ptr", "dt_ptr", "B_ptr", "C_ptr", "z_ptr", "out_ptr")


def stepped(tokens: int = 1, **more: Any) -> Arguments:
    """One step as SGLang launches it: an axis of tokens after that of sequences."""
    call = arguments(3, 4, 6, 16, 2, **more)
    for name in ("dst_state_batch_indices_ptr", "null_block_id", "num_accepted_tokens_ptr", "cu_seqlens_ptr"):
        call.pop(name)
    for name in TOKEN_AXIS:
        if call[name] is not None:
            call[name] = call[name].unsqueeze(1).repeat_interleave(tokens, dim=1)
    call["state_batch_indices_ptr"] = call["state_batch_indices_ptr"].squeeze(-1)
    unused = ("intermediate_states_buffer", "retrieve_parent_token_ptr", "intermediate_state_indices_ptr")
    return {**call, "pad_slot_id": -1, **dict.fromkeys(unused), "DISABLE_STATE_UPDATE": False}


@pytest.fixture(scope="module")
def step() -> Launcher:
    return kernels("sglang", FOLDER + "triton_ops/mamba_ssm.py", head=SOFTPLUS)["_selective_scan_update_kernel"]


def runs_step(step: Launcher) -> Any:
    def run(**call: Any) -> None:
        state, x = call["state_ptr"], call["x_ptr"]
        batch, tokens, heads, dim = x.shape
        axes = {"x": ("batch", "T", "head", "dim"), "dt": ("batch", "T", "head", "dim"), "dt_bias": ("head", "dim")}
        axes |= {"state": ("batch", "head", "dim", "dstate"), "A": ("head", "dim", "dstate"), "D": ("head", "dim")}
        axes |= dict.fromkeys("BC", ("batch", "T", "group", "dstate")) | dict.fromkeys(("z", "out"), axes["x"])
        strides = {
            f"stride_{name}_{axis}": 0 if call[f"{name}_ptr"] is None else call[f"{name}_ptr"].stride(place)
            for name, names in axes.items()
            for place, axis in enumerate(names)
        }
        sizes = {"batch": batch, "T": tokens, "nheads": heads, "dim": dim, "dstate": state.shape[3]}
        fixed = {f"HAS_{name.upper()}": call[f"{name}_ptr"] is not None for name in ("dt_bias", "D", "z")}
        fixed |= {"HAS_STATE_BATCH_INDICES": True, "CACHE_INTERMEDIATE_STATES": False, "PHILOX_ROUNDS": 0}
        fixed |= {"HAS_EAGLE_TREE_CUSTOM_ATTN_MASK": False, "HAS_INTERMEDIATE_STATE_INDICES": False}
        tree = {"stride_retrieve_parent_token_batch": 0, "stride_retrieve_parent_token_T": 0, "cache_steps": 0}
        blocks = {"BLOCK_SIZE_M": 4, "BLOCK_SIZE_DSTATE": 16, "nheads_ngroups_ratio": heads // call["B_ptr"].shape[2]}
        step[(-(-dim // 4), batch, heads)](**call, **strides, **sizes, **fixed, **tree, **blocks)

    return run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gated", [False, True])
def test_a_step_is_sglangs_kernel(step: Launcher, dtype: torch.dtype, gated: bool) -> None:
    gate = {"z_ptr": randn(3, 4, 6, dtype=dtype, seed=8)} if gated else {}
    instance = agrees(OPERATOR, runs_step(step), **stepped(dtype=dtype, **gate))
    words = ("_z" if gated else "") + ("" if dtype == torch.bfloat16 else "_fp32")
    assert instance.name == f"mamba_ssu_decode{words}_h4_d6_s16_ng2"


def test_padding_keeps_its_state(step: Launcher) -> None:
    slots = torch.tensor([[2], [-1], [4]], dtype=torch.int32)
    instance = agrees(OPERATOR, runs_step(step), **stepped(state_batch_indices_ptr=slots))
    assert instance.outputs["output"].get()[1].abs().max() == 0


def test_steps_of_drafted_tokens_are_declined() -> None:
    assert declined(OPERATOR, **stepped(tokens=2))
    for name in ("DISABLE_STATE_UPDATE", "intermediate_states_buffer", "retrieve_parent_token_ptr"):
        assert declined(OPERATOR, **{**stepped(), name: True})


@pytest.fixture(scope="module")
def convolutions() -> dict[str, Launcher]:
    return kernels("sglang", FOLDER + "causal_conv1d_triton.py")


def of_sglang(call: Arguments) -> Arguments:
    """The constants under SGLang's names."""
    for name in ("IS_APC_ENABLED", "num_accepted_tokens_ptr"):
        call.pop(name, None)
    padding, padded = call.pop("null_block_id"), call.pop("HAS_NULL_BLOCK")
    return {**call, "USE_PAD_SLOT": padded, "pad_slot_id": -1 if padding is None else padding}


def strides(**tensors: tuple[torch.Tensor, str]) -> dict[str, int]:
    return {
        f"stride_{name}_{axis}": tensor.stride(place)
        for name, (tensor, axes) in tensors.items()
        for place, axis in enumerate(axes.split())
    }


def updates(convolutions: dict[str, Launcher]) -> Any:
    def run(**call: Any) -> None:
        kernel = convolutions["_causal_conv1d_update_kernel"]
        x, state, weight = call["x_ptr"], call["conv_state_ptr"], call["w_ptr"]
        names = kernel.kernel.arg_names
        unused = {name: None if name.endswith("_ptr") else 0 for name in names if name not in call}
        fixed = {"KERNEL_WIDTH": weight.shape[1], "HAS_BIAS": call["bias_ptr"] is not None, "BLOCK_N": 32}
        fixed |= {"IS_CONTINUOUS_BATCHING": True, "NP2_STATELEN": 4, "NP2_SEQLEN": 1, "stride_state_indices": 1}
        sizes = {"batch": len(x), "dim": x.shape[1], "seqlen": 1, "state_len": state.shape[2]}
        apart = {name: False for name in names if name.startswith(("IS_SPEC", "SAVE", "HAS_EAGLE", "USE_GDC"))}
        steps = strides(x=(x, "seq dim token"), o=(call["o_ptr"], "seq dim token"), w=(weight, "dim width"))
        steps |= strides(conv_state=(state, "seq dim tok"))
        call.pop("query_start_loc_ptr")
        kernel[(len(x), 1)](**{**unused, **apart, **sizes, **fixed, **steps, **call, "num_cache_lines": len(state)})

    return run


def forwards(convolutions: dict[str, Launcher], by_table: bool = False) -> Any:
    def run(**call: Any) -> None:
        x, state, lengths = call["x_ptr"], call["initial_states_ptr"], call["query_start_loc_ptr"].diff()
        pairs = [(row, part) for row, length in enumerate(lengths.tolist()) for part in range(-(-length // 8))]
        table = torch.tensor([*pairs, (-1, 0)], dtype=torch.int32)
        steps = strides(x=(x, "dim token"), o=(call["o_ptr"], "dim token"), w=(call["w_ptr"], "dim width"))
        steps |= strides(istate=(state, "seq dim token")) | {"stride_x_seq": 0, "stride_o_seq": 0}
        fixed = {"KERNEL_WIDTH": 4, "HAS_BIAS": True, "HAS_INITIAL_STATES": True, "HAS_CACHE": True, "BLOCK_N": 32}
        fixed |= {"IS_CONTINUOUS_BATCHING": True, "NP2_STATELEN": 4, "BLOCK_M": 8, "USE_BLOCK_TABLE": by_table}
        sizes = {"dim": len(x), "seqlen": x.shape[1], "num_cache_lines": len(state), "block_table_ptr": table}
        grid = (len(table), 1, 1) if by_table else (len(lengths), -(-int(lengths.max()) // 8), 1)
        convolutions["_causal_conv1d_fwd_kernel"][grid](**call, **steps, **fixed, **sizes)

    return run


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("width", [2, 4])
def test_a_decodes_convolution_is_sglangs_kernel(
    convolutions: dict[str, Launcher], dtype: torch.dtype, width: int
) -> None:
    call = of_sglang(decode([3, -1, 8], 20, width, dtype, padding=-1, out=torch.full((3, 20, 1), 7.0, dtype=dtype)))
    agrees(UPDATE, updates(convolutions), **call)
    for name in ("num_accept_tokens_ptr", "intermediate_conv_window_ptr", "retrieve_next_token_ptr"):
        assert declined(UPDATE, **{**call, name: torch.zeros(3)})


def test_a_decode_that_keeps_no_windows_of_drafted_tokens_passes_its_input_for_them(
    convolutions: dict[str, Launcher],
) -> None:
    call = of_sglang(decode([3, -1, 8], 20, 4, padding=-1, out=torch.full((3, 20, 1), 7.0).half()))
    call |= {"intermediate_conv_window_ptr": call["x_ptr"], "SAVE_INTERMEDIATE": False}
    agrees(UPDATE, updates(convolutions), **call)
    assert declined(UPDATE, **{**call, "SAVE_INTERMEDIATE": True})


@pytest.mark.parametrize("by_table", [False, True])
@pytest.mark.parametrize("counts", [[1], [20, 1, 2, 3], [2, 17, 8]])
def test_a_prefills_convolution_is_sglangs_kernel(
    convolutions: dict[str, Launcher], counts: list[int], by_table: bool
) -> None:
    call = of_sglang(prefill(counts, [4, 2, 7, 5][: len(counts)], padding=-1))
    agrees(FORWARD, forwards(convolutions, by_table), **call)
    assert declined(FORWARD, **{**call, "initial_states_ptr": call["initial_states_ptr"].bfloat16()})


CUDA_NAMES = {
    "w_ptr": "weight",
    "bias_ptr": "bias_",
    "SILU_ACTIVATION": "silu_activation",
    "pad_slot_id": "pad_slot_id",
}
STATE_NAMES = {"conv_state_ptr": "conv_state", "conv_state_indices_ptr": "conv_state_indices"}
PREFILL_NAMES = {
    "initial_states_ptr": "conv_states",
    "cache_indices_ptr": "cache_indices",
    "has_initial_states_ptr": "has_initial_state",
    "query_start_loc_ptr": "query_start_loc",
}


@pytest.mark.parametrize("operator", ["sgl_kernel::causal_conv1d_update", "sglang::mamba_causal_conv1d_update"])
def test_the_decodes_kernel_in_cuda_takes_other_names(convolutions: dict[str, Launcher], operator: str) -> None:
    """It computes the same, over its input, as its source says: it is compared with the Triton kernel."""
    given, names = of_sglang(decode([3, 8, 1], 20, 4, padding=-1)), CUDA_NAMES | STATE_NAMES
    call = {name: given[triton] for triton, name in names.items()} | {"x": given["x_ptr"], "cache_seqlens": None}
    instance = agrees(operator, lambda **_: updates(convolutions)(**given), **call)
    assert instance.name == kernel_of(UPDATE, **given).name
    assert declined(operator, **{**call, "cache_seqlens": torch.zeros(3)})
    assert declined(operator, **{**call, "conv_state_indices": None})
    bound = bound_call(f"{operator}.x", call, conv_state_indices=torch.tensor([3, 8, 1]))
    indices = bound.content("conv_state_indices")
    assert indices is not None and sorted(indices.tolist()) == [1, 2, 3] and bound.spec("conv_state").shape[0] == 4


@pytest.mark.parametrize("operator", ["sgl_kernel::causal_conv1d_fwd", "sglang::mamba_causal_conv1d_fwd"])
def test_the_prefills_kernel_in_cuda_takes_other_names(convolutions: dict[str, Launcher], operator: str) -> None:
    given, names = of_sglang(prefill([2, 17, 8], [4, 2, 7], padding=-1)), CUDA_NAMES | PREFILL_NAMES
    call = {name: given[triton] for triton, name in names.items()} | {"x": given["x_ptr"]}

    def run(**_: Any) -> None:
        forwards(convolutions)(**given)
        given["x_ptr"].copy_(given["o_ptr"])

    assert agrees(operator, run, **call).name == kernel_of(FORWARD, **given).name
    assert declined(operator, **{**call, "cache_indices": None})
    bound = bound_call(f"{operator}.x", call, cache_indices=torch.tensor([4, 2, 7]))
    assert bound.spec("conv_states").shape[0] == 4

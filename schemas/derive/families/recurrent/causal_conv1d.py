"""causal_conv1d: the short convolution before a recurrent layer, one for each channel, by vLLM's and SGLang's Triton
kernels, which have the same names, by SGLang's in CUDA, and by vLLM's for CPUs (a decode).

Each output is a sum over its token and those just before it; the last ones of a sequence stay as its state. A decode
has one token a sequence, a prefill many. Speculative tokens and states kept at block boundaries are declined, and so
are tensors of several dtypes where a slot is padding (`USE_PAD_SLOT`: SGLang's, and vLLM's before 0.22).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import cost_function, family
from kcap.schemas.derive.families.recurrent.states import (
    CUDA_PREFILLS,
    CUDA_UPDATES,
    starts_arg,
    state_of_each,
    states_arg,
    used_states,
    used_tokens,
)
from kcap.schemas.derive.invocation import Invocation, Unrecognized, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, LazyValue, TensorArg, abbreviate, lazy_arg, tensor_arg

UPDATE = """import torch


@torch.no_grad()
def run({inputs}):
    assert weight.shape == ({d}, {w}) and conv_state.shape[1:] == ({d}, {w} - 1)
    used = {used}
    slots = conv_state_indices[used].long()
    window = torch.cat((conv_state[slots], x[used, :, None].to(conv_state.dtype)), dim=-1)
    sums = (window.to(torch.float32) * weight.to(torch.float32)).sum(-1){bias}
    output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    output[used] = {activated}
    new_state = conv_state.clone()
    new_state[slots] = window[..., 1:]
    return output.to(x.dtype), new_state
"""

PREFILL = """import torch


@torch.no_grad()
def run({inputs}):
    assert weight.shape == ({d}, {w}) and conv_state.shape[1:] == ({d}, {w} - 1)
    output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    new_state, starts = conv_state.clone(), query_start_loc.tolist()
    for row, slot in enumerate(conv_state_indices.tolist()):
        tokens = x[starts[row] : starts[row + 1]].mT.to(conv_state.dtype)  # [channels, tokens]
        if {unused}:
            continue
        before = conv_state[slot] if has_initial_state[row] else torch.zeros_like(conv_state[slot])
        window = torch.cat((before, tokens), dim=-1)
        taps = window.to(torch.float32).unfold(-1, {w}, 1)  # [channels, tokens, width]
        sums = torch.einsum("dtw,dw->td", taps, weight.to(torch.float32)){bias}
        output[starts[row] : starts[row + 1]] = {activated}
        new_state[slot] = window[:, 1 - {w} :]
    return output.to(x.dtype), new_state
"""

UNMODELLED = (
    *("num_accepted_tokens_ptr", "initial_state_idx", "block_idx_last_scheduled_token", "IS_APC_ENABLED"),
    *("num_accept_tokens_ptr", "SAVE_INTERMEDIATE", "retrieve_next_token_ptr", "cache_seqlens_ptr"),
)
STATE = ("state_cache_size", "dim", "state_len")


@family("causal_conv1d", "triton::_causal_conv1d_update_kernel")
def update(call: Invocation) -> KernelInstance:
    """A decode. `x_ptr`, `o_ptr`: [batch, channels, 1], perhaps one tensor.

    SGLang passes `x_ptr` once more for the windows of drafted tokens, where a constant says that none are kept.
    """
    call.refuse(*UNMODELLED, "query_start_loc_ptr")
    if call["SAVE_INTERMEDIATE"] is None:
        call.refuse("intermediate_conv_window_ptr")
    out = call.tensor("o_ptr")
    return update_of(call, lambda: out)


def update_of(call: Invocation, written: Callable[[], torch.Tensor]) -> KernelInstance:
    """A decode whose output is `written` once it ran."""
    x = call.tensor("x_ptr").squeeze(-1)
    state, indices = call.tensor("conv_state_ptr"), "conv_state_indices_ptr"
    padding = padding_of(call)

    def used() -> torch.Tensor:
        return used_states(state_of_each(call, len(x), padding, indices), padding).to(x.device)

    return instance(
        call,
        "update",
        UPDATE,
        {
            "x": tensor_arg(x, "batch_size", "dim"),
            "conv_state": tensor_arg(state, *STATE, description="The last tokens of each sequence, updated in place."),
            "conv_state_indices": states_arg(call, "batch_size", len(x), padding, indices),
        },
        lazy_arg(x.dtype, ("batch_size", "dim"), lambda: torch.where(used()[:, None], written().reshape(x.shape), 0.0)),
        lambda: 2 * int(used().sum()) * total_bytes(x[:1], state[:1]),
    )


@family("causal_conv1d", "triton::_causal_conv1d_fwd_kernel")
def forward(call: Invocation) -> KernelInstance:
    """A prefill. `x_ptr`, `o_ptr`: [channels, tokens], sequences joined."""
    call.refuse(*UNMODELLED, "num_computed_tokens")
    x, out = (call.tensor(name).mT for name in ("x_ptr", "o_ptr"))
    state, starts, indices = call.tensor("initial_states_ptr"), call.tensor("query_start_loc_ptr"), "cache_indices_ptr"
    count, padding = len(starts) - 1, padding_of(call)

    def used() -> torch.Tensor:
        return used_tokens(call, starts, out, padding, indices)

    return instance(
        call,
        "prefill",
        PREFILL,
        {
            "x": tensor_arg(x, "total_tokens", "dim"),
            "conv_state": tensor_arg(state, *STATE, description="The last tokens of each sequence, updated in place."),
            "conv_state_indices": states_arg(call, "num_seqs", count, padding, indices),
            "has_initial_state": tensor_arg(call.tensor("has_initial_states_ptr"), "num_seqs"),
            "query_start_loc": starts_arg(starts, len(x)),
        },
        lazy_arg(x.dtype, ("total_tokens", "dim"), lambda: torch.where(used()[:, None], out, 0.0)),
        lambda: 2 * int(used().sum()) * total_bytes(x[:1]) + count * total_bytes(state[:1]),
        ("len_indptr == num_seqs + 1", "total_tokens == query_start_loc[-1].item()"),
    )


SGLANG_NAMES = {  # of the Triton kernels' arguments, for those of the kernels in CUDA, which write over their input
    "x": "x_ptr",
    "weight": "w_ptr",
    "bias_": "bias_ptr",
    "silu_activation": "SILU_ACTIVATION",
    "conv_state": "conv_state_ptr",
    "conv_state_indices": "conv_state_indices_ptr",
    "pad_slot_id": "pad_slot_id",
    "conv_states": "initial_states_ptr",
    "cache_indices": "cache_indices_ptr",
    "has_initial_state": "has_initial_states_ptr",
    "query_start_loc": "query_start_loc_ptr",
}


@family("causal_conv1d", *CUDA_UPDATES)
def cuda_update(call: Invocation) -> KernelInstance:
    call.refuse("cache_seqlens")
    call.tensor("conv_state_indices")  # without them each sequence has the state of its own number
    return update(as_triton(call, SGLANG_NAMES, o_ptr=call["x"], USE_PAD_SLOT=True))


@family("causal_conv1d", *CUDA_PREFILLS)
def cuda_forward(call: Invocation) -> KernelInstance:
    call.tensor("cache_indices")
    return forward(as_triton(call, SGLANG_NAMES, o_ptr=call["x"], USE_PAD_SLOT=True))


CPU_NAMES = {
    "x": "x_ptr",
    "weight": "w_ptr",
    "bias": "bias_ptr",
    "conv_state": "conv_state_ptr",
    "conv_state_indices": "conv_state_indices_ptr",
    "pad_slot_id": "null_block_id",
}


@family("causal_conv1d", "_C::causal_conv1d_update_cpu_vec")
def cpu_update(call: Invocation) -> KernelInstance:
    """`x`: [batch, channels]. It reads as many states' numbers as there are sequences, whatever their strides."""
    call.refuse("query_start_loc")
    if call.tensor("conv_state_indices").numel() != len(call.tensor("x")):
        raise Unrecognized("it reads states' numbers of a table as if it had one column")
    silu = call["activation"] in ("silu", "swish")
    return update_of(as_triton(call, CPU_NAMES, SILU_ACTIVATION=silu, HAS_NULL_BLOCK=True), lambda: call.result)


def as_triton(call: Invocation, names: Mapping[str, str], **more: Any) -> Invocation:
    """With the Triton kernel's arguments: `names` by the call's, and `more`."""
    return Invocation(call.operator, {triton: call[name] for name, triton in names.items()} | more)


def padding_of(call: Invocation) -> int | None:
    """The number that stands for padding among those of states; None if none does."""
    if call["HAS_NULL_BLOCK"] or call["USE_PAD_SLOT"]:
        return int(call.number("null_block_id" if call["HAS_NULL_BLOCK"] else "pad_slot_id"))
    if call["HAS_NULL_BLOCK"] is None and call["USE_PAD_SLOT"] is None:
        raise Unrecognized("its constants are not known")
    return None


def instance(
    call: Invocation,
    kind: str,
    reference: str,
    inputs: dict[str, TensorArg],
    output: TensorArg,
    touched: LazyValue,
    constraints: tuple[str, ...] = (),
) -> KernelInstance:
    """`inputs` without the weights, [channels, width] and perhaps a bias [channels]."""
    x, state = inputs["x"].value, inputs["conv_state"].value
    weight, bias, padding = call.tensor("w_ptr"), call.optional("bias_ptr"), padding_of(call)
    (d, w), silu = weight.shape, call["SILU_ACTIVATION"]
    if state.shape[2] != w - 1 or not isinstance(silu, bool):
        raise Unrecognized("its states hold more tokens than are read, or its constants are not known")
    if call["USE_PAD_SLOT"] is not None and not x.dtype == state.dtype == weight.dtype:
        raise Unrecognized("it rounds states or tokens, of which SGLang's releases do not round the same")
    inputs = {"x": inputs["x"], "weight": tensor_arg(weight, "dim", "width"), **inputs}
    if bias is not None:
        inputs["bias"] = tensor_arg(bias, "dim")
    words = ("_silu" if silu else "") + ("" if bias is not None else "_nobias")
    words += "" if padding is None else f"_pad{padding}"
    words += abbreviate(x.dtype, torch.bfloat16) + abbreviate(state.dtype, x.dtype).replace("_", "_state")
    unused = "tokens.shape[1] == 0" + ("" if padding is None else f" or slot == {padding}")
    everywhere = "torch.ones_like(conv_state_indices, dtype=torch.bool)"
    return KernelInstance(
        name=f"causal_conv1d_{kind}{words}_d{d}_w{w}",
        op_type="causal_conv1d",
        axes={
            **dict.fromkeys(axis for arg in inputs.values() for axis in arg.shape or ()),
            "dim": d,
            "width": w,
            STATE[2]: w - 1,
        },
        inputs=inputs,
        outputs={"output": output, "new_state": lazy_arg(state.dtype, STATE, lambda: state)},
        in_place=(("conv_state", "new_state"),),
        reference=reference.format(
            inputs=", ".join(inputs),
            d=d,
            w=w,
            used=everywhere if padding is None else f"conv_state_indices != {padding}",
            unused=unused,
            bias="" if bias is None else " + bias.to(torch.float32)",
            activated="torch.nn.functional.silu(sums)" if silu else "sums",
        ),
        description="A causal convolution of each channel over the last tokens of its sequence.",
        constraints=constraints,
        flops=2 * x.numel() * w,
        touched=touched,
    )


@cost_function("causal_conv1d")
def causal_conv1d_cost(inputs: CostInputs) -> Cost:
    """Each sequence reads and writes its state; weights count once."""
    x, weight = inputs["x"], inputs["weight"]
    states = len(inputs["conv_state_indices"]) * total_bytes(inputs["conv_state"][:1])
    read = inputs.read("x", "weight") + states
    return Cost(read + total_bytes(x) + states, read, 2 * x.numel() * weight.shape[1], inputs.dtype)

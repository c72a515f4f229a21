"""mamba_ssu: one step of Mamba's selective state space for each sequence, with FlashInfer's names.

By Triton's kernel or vLLM's for CPUs. SGLang's kernel has an axis of tokens after that of sequences, here of one.

Mamba (arXiv:2312.00752) has one head, and a decay for each channel and number of a state; Mamba-2 (arXiv:2405.21060)
many heads with one decay each. Speculative tokens, of which a sequence has several, are declined, and so is
stochastic rounding. Rows of padding are zero, as FlashInfer has them.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.cost import Cost, CostInputs, distinct_bytes
from kcap.schemas.derive.families import cost_function, family
from kcap.schemas.derive.families.recurrent.states import state_of_each, states_arg
from kcap.schemas.derive.invocation import Invocation, Unrecognized, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, dtype_name, lazy_arg, tensor_arg

REFERENCE = """import torch
import torch.nn.functional as F


@torch.no_grad()
def run({inputs}):
    assert state.shape[1:] == ({h}, {d}, {s}) and B.shape[1:] == C.shape[1:] == ({g}, {s})
    output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    new_state = state.clone()
    for row, slot in enumerate(state_batch_indices.tolist()):
        if slot == {padding}:
            continue
        delta = {delta}  # [heads, channels]
        b, c = (m[row].to(torch.float32).repeat_interleave({h} // {g}, dim=0)[:, None] for m in (B, C))
        value = x[row].to(torch.float32)
        decayed = state[slot].to(torch.float32) * torch.exp(A.to(torch.float32) * delta[..., None])
        updated = decayed + (delta * value)[..., None] * b
        output[row] = (updated * c).sum(-1){skip}{gate}
        new_state[slot] = updated.to(state.dtype)
    return output.to(torch.{dtype}), new_state
"""
GATE = "\n        output[row] *= F.silu(z[row].to(torch.float32))"

BATCH = ("batch_size", "nheads", "head_dim")
CACHE = ("state_cache_size", "nheads", "head_dim", "dstate")
GROUPS = ("batch_size", "ngroups", "dstate")
OPTIONAL = {"D": BATCH[1:], "z": BATCH, "dt_bias": BATCH[1:]}
INDICES = ("state_batch_indices_ptr", "dst_state_batch_indices_ptr")


@family("mamba_ssu", "triton::_selective_scan_update_kernel")
def selective_state_update(call: Invocation) -> KernelInstance:
    """`state_ptr`: [states, heads, channels, dstate], `x_ptr`: [batch, heads, channels], `B_ptr`: [batch, groups,
    dstate]. Its constants say whether a softplus is taken; an argument names the state that stands for padding.
    """
    call.refuse("num_accepted_tokens_ptr", "cu_seqlens_ptr", "rand_seed_ptr", "USE_RS_ROUNDING")
    call.refuse("DISABLE_STATE_UPDATE", "intermediate_states_buffer", "retrieve_parent_token_ptr")
    x, dt, b, c, out = (one_token(call, f"{name}_ptr") for name in ("x", "dt", "B", "C", "out"))
    state = call.tensor("state_ptr")
    if call.optional(INDICES[0]) is None or not isinstance(call["DT_SOFTPLUS"], bool):
        raise Unrecognized("it names no states, or its constants are not known")
    padding = int(call.number("null_block_id", "pad_slot_id"))
    (_, h, d, s), g = state.shape, b.shape[1]
    inputs = {
        "state": tensor_arg(state, *CACHE, description="The states of all sequences, updated in place."),
        "x": tensor_arg(x, *BATCH),
        "dt": tensor_arg(dt, *BATCH, description="Time step, before bias and softplus."),
        "A": tensor_arg(call.tensor("A_ptr"), *CACHE[1:], description="The state decays by exp(A dt)."),
        "B": tensor_arg(b, *GROUPS),
        "C": tensor_arg(c, *GROUPS),
    }
    present = [name for name in OPTIONAL if call.optional(f"{name}_ptr") is not None]
    inputs |= {name: tensor_arg(one_token(call, f"{name}_ptr"), *OPTIONAL[name]) for name in present}
    inputs["state_batch_indices"] = states_arg(call, "batch_size", len(x), padding, *INDICES)

    def used() -> torch.Tensor:
        return (state_of_each(call, len(x), padding, *INDICES) != padding).to(out.device)

    biased = "dt[row].to(torch.float32)" + (" + dt_bias.to(torch.float32)" if "dt_bias" in inputs else "")
    words = "_z" if "z" in inputs else ""
    words += "".join(f"_no{name}" for name in ("D", "dt_bias") if name not in inputs)
    words += ("" if call["DT_SOFTPLUS"] else "_nosoftplus") + ("" if padding == -1 else f"_pad{padding}")
    words += abbreviate(x.dtype, torch.bfloat16) + abbreviate(state.dtype, x.dtype).replace("_", "_state")
    row = [inputs[name].get()[:1] for name in ("x", "dt", "B", "C")]
    per_row = 2 * total_bytes(state[:1]) + sum(map(distinct_bytes, row)) + total_bytes(out[:1])
    return KernelInstance(
        name=f"mamba_ssu_decode{words}_h{h}_d{d}_s{s}_ng{g}",
        op_type="mamba_ssu",
        axes={"batch_size": None, "state_cache_size": None, "nheads": h, "head_dim": d, "dstate": s, "ngroups": g},
        inputs=inputs,
        outputs={
            "output": lazy_arg(out.dtype, BATCH, lambda: torch.where(used()[:, None, None], out, 0.0)),
            "new_state": lazy_arg(state.dtype, CACHE, lambda: state),
        },
        reference=REFERENCE.format(
            inputs=", ".join(inputs),
            h=h,
            d=d,
            s=s,
            g=g,
            padding=padding,
            dtype=dtype_name(out.dtype),
            delta=f"F.softplus({biased})" if call["DT_SOFTPLUS"] else biased,
            skip=" + D.to(torch.float32) * value" if "D" in inputs else "",
            gate=GATE if "z" in inputs else "",
        ),
        description="One step of a selective state space model (Mamba) for each sequence.",
        flops=lambda: 6 * int(used().sum()) * state[0].numel(),
        touched=lambda: int(used().sum()) * per_row,
    )


CPU_TENSORS = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "out", "num_accepted_tokens", "cu_seqlens")
CPU_INDICES = ("state_batch_indices", "dst_state_batch_indices")


@family("mamba_ssu", "_C::selective_state_update_cpu")
def cpu_state_update(call: Invocation) -> KernelInstance:
    """The tensors of Triton's kernel, without `_ptr`."""
    named = {f"{name}_ptr": call[name] for name in (*CPU_TENSORS, *CPU_INDICES)}
    constants = {"DT_SOFTPLUS": call["dt_softplus"], "null_block_id": call["null_block_id"]}
    return selective_state_update(Invocation(call.operator, {**named, **constants}))


def one_token(call: Invocation, name: str) -> torch.Tensor:
    """The tensor called `name`, without SGLang's axis of tokens, if it has one."""
    tensor = call.tensor(name)
    if tensor.dim() != 4:
        return tensor
    if tensor.shape[1] != 1:
        raise Unrecognized("it has several tokens of a sequence")
    return tensor.squeeze(1)


@cost_function("mamba_ssu")
def state_update_cost(inputs: CostInputs) -> Cost:
    """Each sequence reads its row of every input, and reads and writes its state; weights count once."""
    rows = len(inputs["x"])
    state = rows * total_bytes(inputs["state"][:1])
    read = state + inputs.read("x", "dt", "B", "C") + sum(inputs.read(name) for name in ("A", "D") if name in inputs)
    output = inputs["x"].numel() * inputs["x"].element_size()
    return Cost(read + state + output, read, 6 * rows * inputs["state"][0].numel(), inputs.dtype)

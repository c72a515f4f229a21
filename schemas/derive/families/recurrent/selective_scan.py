"""selective_scan: Mamba's selective state space (arXiv:2312.00752) over the tokens of a prefill, by vLLM's operator.

Every channel has a state of `dstate` numbers, each with a decay of its own; B and C are shared by a group of channels.
Names are those of `mamba_ssu`, a step of a decode. The operator writes its output over `z` or, without a gate, over
`delta`, and the last states over `ssm_states` (`selective_scan_fwd.cu`; with a gate, `delta` gets the output before it,
which nobody reads). States kept at block boundaries are declined, and so are sequences that are not joined.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import cost_function, family
from kcap.schemas.derive.families.recurrent.states import starts_arg, states_arg, used_tokens
from kcap.schemas.derive.invocation import Invocation, Unrecognized, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, dtype_name, lazy_arg, tensor_arg

REFERENCE = """import torch
import torch.nn.functional as F


@torch.no_grad()
def run({inputs}):
    assert state.shape[1:] == ({d}, {s}) and B.shape[1:] == C.shape[1:] == ({g}, {s})
    output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    new_state, starts = state.clone(), query_start_loc.tolist()
    for row, slot in enumerate(cache_indices.tolist()):
        if slot == {padding} or starts[row] == starts[row + 1]:
            continue
        current = {initial}
        for token in range(starts[row], starts[row + 1]):
            delta, value = {delta}, x[token].to(torch.float32)
            b, c = (m[token].to(torch.float32).repeat_interleave({d} // {g}, dim=0) for m in (B, C))
            decay = torch.exp(A.to(torch.float32) * delta[:, None])
            current = current * decay + (delta * value)[:, None] * b
            output[token] = (current * c).sum(-1){skip}{gate}
        new_state[slot] = current.to(state.dtype)
    return output.to(torch.{dtype}), new_state
"""
INITIAL = "state[slot].to(torch.float32)"
ZERO = f"torch.zeros_like({INITIAL})"
GATE = "\n            output[token] *= F.silu(z[token].to(torch.float32))"

TOKENS, GROUPS = ("total_tokens", "dim"), ("total_tokens", "ngroups", "dstate")
CACHE = ("state_cache_size", "dim", "dstate")
BLOCKS = ("block_idx_first_scheduled_token", "block_idx_last_scheduled_token", "initial_state_idx")


@family("selective_scan", "_C::selective_scan_fwd")
def selective_scan(call: Invocation) -> KernelInstance:
    """`u`, `delta`, `z_`: [channels, tokens], `B`, `C`: [groups, dstate, tokens], `ssm_states`: [states, channels,
    dstate].
    """
    call.refuse(*BLOCKS)
    u, dt, a, b, c = (call.tensor(name) for name in ("u", "delta", "A", "B", "C"))
    state, starts, has_initial = (call.optional(n) for n in ("ssm_states", "query_start_loc", "has_initial_state"))
    if state is None or starts is None or call.optional("cache_indices") is None:
        raise Unrecognized("its sequences are not joined, or it names no states")
    skip, z, bias, softplus = (
        call.optional("D_"),
        call.optional("z_"),
        call.optional("delta_bias_"),
        call["delta_softplus"],
    )
    if not isinstance(softplus, bool):
        raise Unrecognized("whether it takes a softplus is not known")
    padding, count = int(call.number("null_block_id", "pad_slot_id")), len(starts) - 1
    (d, s), g, out = a.shape, b.shape[0], dt.mT if z is None else z.mT

    def used() -> torch.Tensor:
        return used_tokens(call, starts, out, padding, "cache_indices")

    inputs = {
        "x": tensor_arg(u.mT, *TOKENS),
        "dt": tensor_arg(dt.mT, *TOKENS, description="Time step, before bias and softplus."),
        "A": tensor_arg(a, *CACHE[1:], description="The state decays by exp(A dt)."),
        "B": tensor_arg(b.permute(2, 0, 1), *GROUPS),
        "C": tensor_arg(c.permute(2, 0, 1), *GROUPS),
        "state": tensor_arg(state, *CACHE, description="The states of all sequences, updated in place."),
    }
    optional = {"D": skip, "dt_bias": bias}
    inputs |= {name: tensor_arg(tensor, "dim") for name, tensor in optional.items() if tensor is not None}
    if z is not None:
        inputs["z"] = tensor_arg(z.mT, *TOKENS)
    inputs["cache_indices"] = states_arg(call, "num_seqs", count, padding, "cache_indices")
    if has_initial is not None:
        inputs["has_initial_state"] = tensor_arg(has_initial, "num_seqs")
    inputs["query_start_loc"] = starts_arg(starts, u.shape[1])
    biased = "dt[token].to(torch.float32)" + (" + dt_bias.to(torch.float32)" if bias is not None else "")
    words = ("_z" if z is not None else "") + "".join(f"_no{name}" for name, part in optional.items() if part is None)
    words += ("" if softplus else "_nosoftplus") + ("" if has_initial is not None else "_noinitial")
    words += ("" if padding == -1 else f"_pad{padding}") + abbreviate(u.dtype, torch.bfloat16)
    words += abbreviate(state.dtype, u.dtype).replace("_", "_state")
    row = (
        2 * total_bytes(u[:, :1]) + total_bytes(b[..., :1], c[..., :1]) + (1 if z is None else 2) * total_bytes(out[:1])
    )
    return KernelInstance(
        name=f"selective_scan{words}_d{d}_s{s}_ng{g}",
        op_type="selective_scan",
        axes={**dict.fromkeys(axis for arg in inputs.values() for axis in arg.shape or ()), "dim": d, "dstate": s}
        | {"ngroups": g},
        inputs=inputs,
        outputs={
            "output": lazy_arg(out.dtype, TOKENS, lambda: torch.where(used()[:, None], out, 0.0)),
            "new_state": lazy_arg(state.dtype, CACHE, lambda: state),
        },
        reference=REFERENCE.format(
            inputs=", ".join(inputs),
            d=d,
            s=s,
            g=g,
            padding=padding,
            initial=ZERO if has_initial is None else f"{INITIAL} if has_initial_state[row] else {ZERO}",
            delta=f"F.softplus({biased})" if softplus else biased,
            skip=" + D.to(torch.float32) * value" if skip is not None else "",
            gate=GATE if z is not None else "",
            dtype=dtype_name(out.dtype),
        ),
        description="A selective state space model (Mamba) over the tokens of each sequence.",
        constraints=("len_indptr == num_seqs + 1", "total_tokens == query_start_loc[-1].item()"),
        flops=lambda: 6 * int(used().sum()) * a.numel(),
        touched=lambda: int(used().sum()) * row + total_bytes(a) + 2 * count * total_bytes(state[:1]),
    )


@cost_function("selective_scan")
def selective_scan_cost(inputs: CostInputs) -> Cost:
    """Each sequence reads and writes its state; weights count once."""
    x, a = inputs["x"], inputs["A"]
    states = len(inputs["cache_indices"]) * total_bytes(inputs["state"][:1])
    read = states + inputs.read(*(name for name in ("x", "dt", "A", "B", "C", "D", "dt_bias", "z") if name in inputs))
    return Cost(read + states + total_bytes(x), read, 6 * len(x) * a.numel(), inputs.dtype)

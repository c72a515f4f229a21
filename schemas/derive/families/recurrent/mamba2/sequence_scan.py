"""mamba2_scan: Mamba-2's prefill token by token (arXiv:2405.21060, section 5), by vLLM's kernel for CPUs.

Names are those of `mamba_ssu`, a step of a decode; a bias and a softplus were taken before.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule
from kcap.schemas.derive.families.recurrent.states import starts_arg
from kcap.schemas.derive.invocation import Invocation, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, dtype_name, tensor_arg

OPERATOR = "_C::mamba_chunk_scan_fwd_cpu"
REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert x.shape[1:] == ({h}, {d}) and B.shape[1:] == C.shape[1:] == ({g}, {s})
    output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    new_state, starts = initial_state.clone(), query_start_loc.tolist()
    for row in range(len(new_state)):
        state = new_state[row].to(torch.float32)
        for token in range(starts[row], starts[row + 1]):
            delta, value = dt[token].to(torch.float32)[:, None], x[token].to(torch.float32)
            b, c = (m[token].to(torch.float32).repeat_interleave({h} // {g}, dim=0)[:, None] for m in (B, C))
            decay = torch.exp(A.to(torch.float32)[:, None] * delta)
            state = state * decay[..., None] + (delta * value)[..., None] * b
            output[token] = (state * c).sum(-1){skip}
        new_state[row] = state
    return output.to(torch.{dtype}), new_state
"""

TOKENS, GROUPS = ("total_tokens", "nheads", "head_dim"), ("total_tokens", "ngroups", "dstate")
STATES = ("num_seqs", "nheads", "head_dim", "dstate")


@family("mamba2_scan", OPERATOR)
def sequence_scan(call: Invocation) -> KernelInstance:
    """`x`: [tokens, heads, channels], `final_states`: [sequences, heads, channels, dstate], before it the first."""
    call.refuse("z")
    x, dt, a, b, c, states, out, starts = (
        call.tensor(name) for name in ("x", "dt", "A", "B", "C", "final_states", "out", "cu_seqlens")
    )
    skip = call.optional("D")
    inputs = {
        "x": tensor_arg(x, *TOKENS),
        "dt": tensor_arg(dt, *TOKENS[:2], description="Time step, after bias and softplus."),
        "A": tensor_arg(a, "nheads", description="The state decays by exp(A dt)."),
        "B": tensor_arg(b, *GROUPS),
        "C": tensor_arg(c, *GROUPS),
    }
    if skip is not None:
        inputs["D"] = tensor_arg(skip, "nheads")
    inputs["initial_state"] = tensor_arg(states, *STATES, description="The state that each sequence begins with.")
    inputs["query_start_loc"] = starts_arg(starts, len(x))
    (_, h, d), (_, g, s) = x.shape, b.shape
    words = ("" if skip is not None else "_noD") + abbreviate(x.dtype, torch.bfloat16)
    return KernelInstance(
        name=f"mamba2_scan{words}_h{h}_d{d}_s{s}_ng{g}",
        op_type="mamba2_scan",
        axes={**dict.fromkeys(axis for arg in inputs.values() for axis in arg.shape or ()), "nheads": h}
        | {"head_dim": d, "dstate": s, "ngroups": g},
        inputs=inputs,
        outputs={"output": tensor_arg(out, *TOKENS), "new_state": tensor_arg(states, *STATES)},
        in_place=(("initial_state", "new_state"),),
        reference=REFERENCE.format(
            inputs=", ".join(inputs),
            h=h,
            d=d,
            s=s,
            g=g,
            skip=" + D.to(torch.float32)[:, None] * value" if skip is not None else "",
            dtype=dtype_name(out.dtype),
        ),
        description="Mamba-2 over the tokens of each sequence.",
        constraints=("len_indptr == num_seqs + 1", "total_tokens == query_start_loc[-1].item()"),
        flops=6 * len(x) * states[0].numel(),
    )


@cost_function("mamba2_scan")
def sequence_scan_cost(inputs: CostInputs) -> Cost:
    """Each sequence reads and writes its state; weights count once."""
    x, states = inputs["x"], inputs["initial_state"]
    read = inputs.read(*(name for name in ("x", "dt", "A", "B", "C", "D", "initial_state") if name in inputs))
    return Cost(read + total_bytes(x, states), read, 6 * len(x) * states[0].numel(), inputs.dtype)


@replay_rule(OPERATOR)
class SequenceScan(ReplayRule):
    """States that decay, as in models: else they grow from token to token, and outputs overflow."""

    def prepare(self, bound: BoundCall) -> None:
        bound.set_content("A", -torch.rand(bound.spec("A").shape))
        bound.set_content("dt", torch.rand(bound.spec("dt").shape))

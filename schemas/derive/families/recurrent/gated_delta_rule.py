"""gdn: one step of the gated delta rule (arXiv:2412.06464) for each sequence, by Triton's kernels of Qwen3-Next.

As FlashInfer's decode, whose state has keys last, but with a pool of states and the number of each sequence's. Of one
kernel the gates are inputs, others compute them from the projections. Rows of padding are zero.

The kernel of packed projections rounds the rate to the projection's dtype in SGLang (0.5.15, 0.5.23) and in vLLM's
earlier releases, but not where it takes SPLIT_BATCH_HEAD_GRID (vLLM 0.32). SGLang gives no sequence state 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import cost_function, family
from kcap.schemas.derive.families.recurrent.states import state_of_each
from kcap.schemas.derive.invocation import Invocation, Unrecognized, require_values, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, scalar_arg, tensor_arg

REFERENCE = """import torch
import torch.nn.functional as F


@torch.no_grad()
def run({inputs}):
    assert q.shape[1:] == k.shape[1:] == ({h}, {k}) and state.shape[1:] == ({hv}, {v}, {k})
    output = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    new_state = state.clone()
    for row, slot in enumerate(state_indices.tolist()):
        if slot <= 0:
            continue
        query, key = (m[row].to(torch.float32).repeat_interleave({hv} // {h}, dim=0) for m in (q, k))
{normed}        decay = {decay}
        rate = {rate}
        old = state[slot].to(torch.float32) * decay[:, None, None]  # [heads, values, keys]
        change = (v[row].to(torch.float32) - torch.einsum("hvk,hk->hv", old, key)) * rate[:, None]
        new = old + change[:, :, None] * key[:, None]
        output[row] = torch.einsum("hvk,hk->hv", new, query) * scale
        new_state[slot] = new.to(state.dtype)
    return output.to(v.dtype), new_state
"""
NORMED = """        query = query * torch.rsqrt(query.pow(2).sum(-1, keepdim=True) + 1e-6)
        key = key * torch.rsqrt(key.pow(2).sum(-1, keepdim=True) + 1e-6)
"""
GIVEN = "torch.exp(g[row].to(torch.float32))", "beta[row].to(torch.float32)"
COMPUTED = (
    "torch.exp(-A_log.to(torch.float32).exp() * F.softplus(a[row].to(torch.float32) + dt_bias.to(torch.float32)))",
    "torch.sigmoid(b[row].to(torch.float32))",
)
ROUNDED = ".to(b.dtype).to(torch.float32)"

KEYS, VALUES = ("batch_size", "num_q_heads", "head_size"), ("batch_size", "num_v_heads", "v_head_size")
POOL = ("pool_size", "num_v_heads", "v_head_size", "head_size")
PER_HEAD = ("batch_size", "num_v_heads")


@dataclass(frozen=True)
class Step:
    """An invocation. `q`, `k`: [batch, heads, size], `v`, `output`: [batch, value heads, value size].

    `gates`: inputs by name, [batch, value heads] or [value heads]. `starts`: where each sequence's tokens begin, where
    one may have none. `rounded`: the rate is rounded to the dtype of its projection.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gates: dict[str, torch.Tensor]
    output: torch.Tensor
    starts: torch.Tensor | None = None
    rounded: bool = False


@family("gdn", "triton::fused_recurrent_gated_delta_rule_fwd_kernel")
def recurrent(call: Invocation) -> KernelInstance:
    """Its gates are inputs: the logarithm of the decay, and the rate at which the state takes values on."""
    call.refuse("IS_BETA_HEADWISE")
    return step_instance(call, joined_step(call, {name: call.tensor(name).flatten(0, -2) for name in ("g", "beta")}))


@family("gdn", "triton::fused_sigmoid_gating_delta_rule_update_kernel")
def sigmoid_gating(call: Invocation) -> KernelInstance:
    require_softplus(call["threshold"], call["beta"])
    return step_instance(call, joined_step(call, projections(call)))


@family("gdn", "triton::fused_recurrent_gated_delta_rule_packed_decode_kernel")
def packed_decode(call: Invocation) -> KernelInstance:
    """`mixed_qkv`: [batch, queries, keys and values of all heads]."""
    require_softplus(call["SOFTPLUS_THRESHOLD"], 1.0)
    mixed, (hv, v, k) = call.tensor("mixed_qkv"), call.tensor("h0").shape[1:]
    keys = (mixed.shape[1] - hv * v) // 2
    queries, key, values = mixed.split([keys, keys, hv * v], dim=1)
    step = Step(
        q=queries.unflatten(1, (-1, k)),
        k=key.unflatten(1, (-1, k)),
        v=values.unflatten(1, (hv, v)),
        gates=projections(call),
        output=call.tensor("o").reshape(-1, hv, v),
        rounded=call["SPLIT_BATCH_HEAD_GRID"] is None and call.tensor("b").dtype != torch.float32,
    )
    return step_instance(call, step)


def require_softplus(threshold: object, beta: object) -> None:
    if threshold != 20 or beta != 1:
        raise Unrecognized("another softplus than PyTorch's")


def projections(call: Invocation) -> dict[str, torch.Tensor]:
    """What the kernel computes its gates from."""
    gates = {name: call.tensor(name) for name in ("A_log", "a", "dt_bias", "b")}
    return {name: gate.flatten(0, -2) if gate.dim() > 1 else gate for name, gate in gates.items()}


def joined_step(call: Invocation, gates: dict[str, torch.Tensor]) -> Step:
    """Of queries, keys and values [1 or batch, tokens, heads, size]: one token a sequence."""
    call.refuse("num_accepted_tokens", "IS_KDA")
    starts, (q, k, v) = call.optional("cu_seqlens"), (call.tensor(name).flatten(0, 1) for name in ("q", "k", "v"))
    sequences = call.tensor("q").shape[0] if starts is None else len(starts) - 1
    if len(q) != sequences or call["INPLACE_FINAL_STATE"] is not True:
        raise Unrecognized("a sequence has several tokens, or its states are written elsewhere")
    return Step(q, k, v, gates, call.tensor("o").reshape(v.shape), starts)


def step_instance(call: Invocation, step: Step) -> KernelInstance:
    """A step of all sequences as a kernel instance; numbers of states that are not positive stand for padding."""
    state, (count, h, k), (_, hv, v) = call.tensor("h0"), step.q.shape, step.v.shape
    normed, (decay, rate) = call["USE_QK_L2NORM_IN_KERNEL"], GIVEN if "g" in step.gates else COMPUTED
    if call.optional("ssm_state_indices") is None or not isinstance(normed, bool):
        raise Unrecognized("it names no states, or its constants are not known")

    def state_indices() -> torch.Tensor:
        states = state_of_each(call, count, 0, "ssm_state_indices").clamp(min=0)
        if step.starts is None:
            return states
        starts = require_values(step.starts, "sequence starts")
        used = (starts.diff() == 1) & (states > 0)
        if bool((starts[:-1] != torch.arange(count, device=starts.device))[used].any()) or starts.diff().max() > 1:
            raise Unrecognized("a sequence has several tokens")
        return torch.where(used, states, 0)

    inputs = {
        "q": tensor_arg(step.q, *KEYS),
        "k": tensor_arg(step.k, *KEYS),
        "v": tensor_arg(step.v, *VALUES),
        "state": tensor_arg(state, *POOL, description="The states of all sequences, keys last, updated in place."),
        **{name: tensor_arg(gate, *PER_HEAD[2 - gate.dim() :]) for name, gate in step.gates.items()},
        "state_indices": lazy_arg(
            "int32", ("batch_size",), state_indices, "The number of each sequence's state; 0: padding, and none."
        ),
        "scale": scalar_arg(float(call.number("scale")), description="Scale of the queries."),
    }
    rate += ROUNDED if step.rounded else ""
    words = ("_gates" if "g" in step.gates else "") + ("_l2norm" if normed else "")
    words += "_rounded" if step.rounded else ""
    words += abbreviate(step.v.dtype, torch.bfloat16) + abbreviate(state.dtype, torch.float32).replace("_", "_state")
    size = f"d{k}" if k == v else f"k{k}_d{v}"
    rows = [inputs[name].value for name in ("q", "k", "v")]

    def used() -> torch.Tensor:
        return (state_indices() > 0).to(step.output.device)

    return KernelInstance(
        name=f"gdn_decode_pool{words}_qk{h}_v{hv}_{size}_k_last",
        op_type="gdn",
        axes={**dict(zip(POOL, (None, hv, v, k), strict=True)), "num_q_heads": h, "batch_size": None},
        inputs=inputs,
        outputs={
            "output": lazy_arg(step.v.dtype, VALUES, lambda: torch.where(used()[:, None, None], step.output, 0.0)),
            "new_state": lazy_arg(state.dtype, POOL, lambda: state),
        },
        reference=REFERENCE.format(
            inputs=", ".join(inputs),
            h=h,
            hv=hv,
            k=k,
            v=v,
            normed=NORMED if normed else "",
            decay=decay,
            rate=rate,
        ),
        description="One step of the gated delta rule for each sequence, over a pool of states.",
        flops=lambda: 8 * int(used().sum()) * hv * v * k,
        touched=lambda: (
            int(used().sum()) * (2 * total_bytes(state[:1]) + sum(total_bytes(row[:1]) for row in (*rows, step.output)))
        ),
    )


@cost_function("gdn")
def gated_delta_rule_cost(inputs: CostInputs) -> Cost:
    """Each sequence reads and writes its state; a prefill, whose products depend on its chunks, has no FLOPs here."""
    v, state = inputs["v"], inputs["state"]
    decode = "state_indices" in inputs or v.dim() == 4
    states = (len(inputs["state_indices"]) if "state_indices" in inputs else len(state)) * total_bytes(state[:1])
    read = states + inputs.read("q", "k", "v")
    return Cost(read + states + total_bytes(v), read, 8 * v.shape[0] * state[0].numel() if decode else 0, inputs.dtype)

"""gdn_prefill: the gated delta rule (arXiv:2412.06464) over all tokens of a prefill, by FlashInfer's one kernel.

vLLM runs it on Hopper where FlashInfer is installed, in place of the kernels of `chunked_delta_rule`. Names are those
of FlashInfer-Bench's gdn_prefill, but for the gates, which are inputs here. The state that a key meets, and what it
changes, are rounded as a kernel rounds them that divides the tokens into chunks (FlashInfer 0.6.11's for Hopper). The
state that a query meets is not: by such rounding a query that is nearly orthogonal to it would get noise for a value.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.families import ReplayRule, family, replay_rule, valid_input
from kcap.schemas.derive.families.recurrent.chunks import forgetting_rates
from kcap.schemas.derive.families.recurrent.states import starts_arg
from kcap.schemas.derive.invocation import Invocation, Unrecognized
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, scalar_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert q.shape[1:] == k.shape[1:] == ({h}, {k}) and state.shape[1:] == ({hv}, {v}, {k})
    query, key = (m.to(torch.float32).repeat_interleave({hv} // {h}, dim=1) for m in (q, k))
    value, new_state = v.to(torch.float32), state.to(torch.float32).clone()
    output = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    bounds = query_start_loc.tolist()
    for sequence, (start, end) in enumerate(zip(bounds, bounds[1:])):
        for token in range(start, end):
            old = new_state[sequence] * decay[token, :, None, None]  # [heads, values, keys]
            known = torch.einsum("hvk,hk->hv", old.to(v.dtype).to(torch.float32), key[token])
            change = ((value[token] - known) * beta[token, :, None]).to(v.dtype).to(torch.float32)
            new = new_state[sequence] = old + change[:, :, None] * key[token, :, None]
            output[token] = torch.einsum("hvk,hk->hv", new.to(torch.float32), query[token]) * scale
    return output.to(v.dtype){final}
"""
FINAL = ", new_state.to(torch.{dtype})"
KEYS, VALUES = ("total_seq_len", "num_q_heads", "head_size"), ("total_seq_len", "num_v_heads", "v_head_size")
STATES = ("num_seqs", "num_v_heads", "v_head_size", "head_size")
OPTIONS = (
    "use_qk_l2norm_in_kernel",  # FlashInfer 0.6 passes over it on Hopper
    "state_indices",
    "output_state_indices",
    "use_gate_in_kernel",
    "beta_is_logit",
    "prefix_lens",
)


@family("gdn", "flashinfer::chunk_gated_delta_rule")
def prefill(call: Invocation) -> KernelInstance:
    """`q`, `k`: [tokens, heads, key size], `v`: [tokens, value heads, value size], sequences joined.

    `g`: what is left of the state at each token, [tokens, value heads], 0 to 1; `beta`: the rate at which it takes the
    token's value on. `initial_state`: [sequences, value heads, value size, key size]. The states within a sequence that
    a prefix cache keeps (`state_checkpoints`) are no output of the Definition.
    """
    call.refuse(*OPTIONS)
    q, v, state = call.tensor("q"), call.tensor("v"), call.tensor("initial_state")
    (tokens, h, k), (_, hv, size) = q.shape, v.shape
    if call["gate_domain"] not in (None, "linear"):
        raise Unrecognized("its gates are logarithms")
    if hv % h or state.shape[1] != hv:
        raise Unrecognized("it has more heads of queries than of values")
    inputs = {
        "q": tensor_arg(q, *KEYS),
        "k": tensor_arg(call.tensor("k"), *KEYS),
        "v": tensor_arg(v, *VALUES),
        "state": tensor_arg(state, *STATES, description="The state of each sequence, keys last."),
        "decay": tensor_arg(call.tensor("g"), *VALUES[:2], description="What each token leaves of the state."),
        "beta": tensor_arg(call.tensor("beta"), *VALUES[:2], description="The rate at which it takes values on."),
        "query_start_loc": starts_arg(call.tensor("cu_seqlens"), tokens),
        "scale": scalar_arg(float(call["scale"] or k**-0.5), description="Scale of the queries."),
    }
    outputs = {"output": lazy_arg(v.dtype, VALUES, lambda: _part(call, "output", 0))}
    final = bool(call["output_final_state"])
    if final:
        written = call.optional("output_state")
        dtype = torch.float32 if written is None else written.dtype
        outputs["new_state"] = lazy_arg(dtype, STATES, lambda: _part(call, "output_state", 1))
    words = ("" if final else "_nofinal") + abbreviate(v.dtype, torch.bfloat16)
    sizes = f"d{k}" if k == size else f"k{k}_d{size}"
    return KernelInstance(
        name=f"gdn_prefill_gates{words}_qk{h}_v{hv}_{sizes}_k_last",
        op_type="gdn",
        axes={
            **dict(zip(STATES, (None, hv, size, k), strict=True)),
            "num_q_heads": h,
            "total_seq_len": None,
            "len_indptr": None,
        },
        inputs=inputs,
        outputs=outputs,
        reference=REFERENCE.format(
            inputs=", ".join(inputs),
            h=h,
            hv=hv,
            k=k,
            v=size,
            final=FINAL.format(dtype=outputs["new_state"].dtype) if final else "",
        ),
        description="The gated delta rule over all tokens of each sequence, from a state to the next.",
        constraints=("len_indptr == num_seqs + 1",),
    )


def _part(call: Invocation, written: str, number: int) -> torch.Tensor:
    """Output `number`, which it returns, or writes to the argument of this name."""
    if (tensor := call.optional(written)) is not None:
        return tensor
    returned: torch.Tensor = call.result[number] if isinstance(call.result, tuple | list) else call.result
    return returned


@valid_input("decay", op_types=("gdn",))
def decay(draft: WorkloadDraft, name: str) -> torch.Tensor:
    return torch.exp(-forgetting_rates(draft, *draft.shape(name)))


@replay_rule("flashinfer::chunk_gated_delta_rule")
class Prefill(ReplayRule):
    """Keys of length one and gates from 0 to 1, as in models: else the state grows from token to token."""

    def prepare(self, bound: BoundCall) -> None:
        bound.set_content("k", torch.nn.functional.normalize(torch.randn(bound.spec("k").shape), dim=-1))
        for name in ("g", "beta"):
            if bound[name] is not None:
                bound.set_content(name, torch.rand(bound.spec(name).shape))

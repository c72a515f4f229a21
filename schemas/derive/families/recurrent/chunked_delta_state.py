"""gdn_chunk_state, gdn_chunk_output: what the gated delta rule's chunks pass on and give, by `chunked_delta_rule`'s WY.

The state, [values, keys] of each head, goes from chunk to chunk of a sequence: it decays, and takes on what it did not
give for the chunk's keys before. An output is what the state before its chunk gives for its query, and what the tokens
before it in the chunk do. vLLM's kernel is handed the states of its sequences, SGLang's (0.5.15, 0.5.23) a pool of all
states and the number of each sequence's, whose state it replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.families import ReplayRule, family, replay_rule, valid_input
from kcap.schemas.derive.families.recurrent.chunked_delta_rule import (
    DECAY,
    KEYS,
    VALUES,
    delta_kernel,
    dtype_word,
    gate_of,
    joined,
    sequences_of,
    set_falling_gate,
)
from kcap.schemas.derive.families.recurrent.chunks import (
    chunks_of,
    counts_work,
    numbered,
    read_bytes,
    sequences_with_states,
)
from kcap.schemas.derive.families.recurrent.states import shrink_states, states_arg
from kcap.schemas.derive.invocation import Invocation, Unrecognized, total_bytes
from kcap.schemas.derive.kernel import (
    KernelInstance,
    TensorArg,
    abbreviate,
    dtype_name,
    lazy_arg,
    scalar_arg,
    tensor_arg,
)
from kcap.schemas.derive.workload_draft import WorkloadDraft

STATE = """    assert k.shape[1:] == ({num_k_heads}, {head_size}) and u.shape[1:] == ({num_v_heads}, {v_head_size})
    shape = (len(chunk_indices), {num_v_heads}, {v_head_size}, {head_size})
    h = torch.zeros(shape, dtype=torch.float32, device=k.device)
    v_new = torch.zeros(u.shape, dtype=torch.float32, device=u.device)
    final_state = {initial}
{each_chunk}        old = h[chunk] = final_state[sequence]
        before = torch.einsum("thk,hvk->thv", w[start:end].to(torch.float32), old.to(w.dtype).to(torch.float32))
        value = v_new[start:end] = u[start:end].to(torch.float32) - before{decay}
        key = k[start:end].to(torch.float32).repeat_interleave({num_v_heads} // {num_k_heads}, dim=1)
        final_state[sequence] = old + torch.einsum("thv,thk->hvk", value.to(k.dtype).to(torch.float32), key)
{stored}    return h.to(torch.{dtype}), v_new.to(u.dtype){final}
"""
INITIAL = "initial_state.to(torch.float32).clone()"
OF_POOL = """state[state_indices.clamp(min=0).long()].to(torch.float32)
    final_state[state_indices < 0] = 0.0"""
INTO_POOL = """    new_state, kept = state.clone(), state_indices >= 0
    new_state[state_indices[kept].long()] = final_state[kept].to(state.dtype)
"""
STATE_DECAY = """
        sums = gate[start:end].to(torch.float32)
        value = value * torch.exp(sums[-1] - sums)[..., None]
        old = old * torch.exp(sums[-1])[:, None, None]"""

OUTPUT = """    assert q.shape[1:] == k.shape[1:] == ({num_k_heads}, {head_size})
    assert v_new.shape[1:] == ({num_v_heads}, {v_head_size})
    output = torch.zeros(v_new.shape, dtype=torch.float32, device=v_new.device)
{each_chunk}        query, key = (m[start:end].to(torch.float32) for m in (q, k))
        products = torch.einsum("ihk,jhk->hij", query, key).repeat_interleave({num_v_heads} // {num_k_heads}, dim=0)
        query = query.repeat_interleave({num_v_heads} // {num_k_heads}, dim=1)
        before = torch.einsum("thk,hvk->thv", query, h[chunk].to(torch.float32)){decay}
        within = torch.einsum("hij,jhv->ihv", products.tril(), v_new[start:end].to(torch.float32))
        output[start:end] = (before + within) * scale
    return output.to(torch.{dtype})
"""
OUTPUT_DECAY = f"""{DECAY}
        before = before * torch.exp(sums).mT[..., None]"""

STATES = ("num_chunks", "num_v_heads", "v_head_size", "head_size")
POOL = ("pool_size", *STATES[1:])


@family("gdn_chunk_state", "triton::chunk_gated_delta_rule_fwd_kernel_h_blockdim64")
def chunk_state(call: Invocation) -> KernelInstance:
    """`v`: u of the WY representation; `h`: [1, chunks, heads, value size, key size]; `h0`, `ht`: [sequences, …], or
    `initial_state`: [states, …], of which `initial_state_indices` tells each sequence's.

    `chunk_offsets`: where the chunks of each sequence begin, of which it is told which chunk is whose.
    """
    call.refuse("gk", "USE_EXP2", "TRACK_STATE")
    before = pooled_states(call) if call["initial_state_indices"] is not None else states_by_sequence(call)
    inputs = {
        "k": joined(call, "k", *KEYS),
        "w": joined(call, "w", "total_tokens", "num_v_heads", "head_size"),
        "u": joined(call, "v", *VALUES),
        **gate_of(call),
        **before.inputs,
        **sequences_of(call, indices_of(call.tensor("chunk_offsets"), call.tensor("h").shape[1])),
    }
    outputs = {
        "h": joined(call, "h", *STATES, description="The state before each chunk."),
        "v_new": joined(call, "v_new", *VALUES, description="Of each value what the state did not give before."),
        **before.outputs,
    }
    words = before.word + ("" if "gate" in inputs else "_nogate") + ("" if before.outputs else "_nofinal")
    words += abbreviate(call.tensor("k").dtype, torch.bfloat16) + dtype_word(before.tensor, "state")
    texts = {"decay": STATE_DECAY if "gate" in inputs else "", "dtype": outputs["h"].dtype}
    return delta_kernel(
        call,
        "gdn_chunk_state",
        words,
        inputs,
        outputs,
        STATE,
        {**texts, **before.texts},
        "The state of the gated delta rule before each chunk, and after the last of each sequence.",
        state_work,
        ("len_indptr == num_seqs + 1",),
    )


@dataclass(frozen=True)
class SequenceStates:
    """The states of the sequences: as inputs, and as outputs if they are kept; the texts of the reference."""

    tensor: torch.Tensor
    inputs: dict[str, TensorArg]
    outputs: dict[str, TensorArg]
    texts: dict[str, str | float]
    word: str = ""


def states_by_sequence(call: Invocation) -> SequenceStates:
    """vLLM's: a state for each sequence."""
    axes, final = ("num_seqs", *STATES[1:]), call.optional("ht")
    return SequenceStates(
        tensor=call.tensor("h0"),
        inputs={"initial_state": tensor_arg(call.tensor("h0"), *axes)},
        outputs={} if final is None else {"final_state": tensor_arg(final, *axes)},
        texts={
            "initial": INITIAL,
            "stored": "",
            "final": "" if final is None else f", final_state.to(torch.{dtype_name(final.dtype)})",
        },
    )


def pooled_states(call: Invocation) -> SequenceStates:
    """SGLang's: negative numbers stand for padding, which starts from zero and keeps no state.

    0.5.15's kernel, which has no stride of states, does not ask: it reaches before the pool.
    """
    state, count = call.tensor("initial_state"), len(call.tensor("initial_state_indices"))
    numbers = states_arg(call, "num_seqs", count, -1, "initial_state_indices")

    def in_pool() -> torch.Tensor:
        states: torch.Tensor = numbers.get()
        if call["stride_init_state"] is None and (states < 0).any():
            raise Unrecognized("its padding has no state")
        return states

    if call["USE_INITIAL_STATE"] is not True or call["INPLACE_UPDATE"] is not True:
        raise Unrecognized("it reads or keeps no states")
    return SequenceStates(
        tensor=state,
        inputs={
            "state": tensor_arg(state, *POOL, description="The states of all sequences, updated in place."),
            "state_indices": replace(numbers, value=in_pool),
        },
        outputs={"new_state": lazy_arg(state.dtype, POOL, lambda: state)},
        texts={"initial": OF_POOL, "stored": INTO_POOL, "final": ", new_state"},
        word="_pool",
    )


def indices_of(chunk_offsets: torch.Tensor, count: int) -> torch.Tensor:
    """The sequence of each of `count` chunks, and its number within that; without values where there are none."""
    if chunk_offsets.is_meta:
        return torch.empty(count, 2, dtype=torch.int32, device="meta")
    return torch.stack(numbered(chunk_offsets.long().diff()), dim=1).to(torch.int32)


@counts_work("gdn_chunk_state")
def state_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    """Each token reads the state, and changes it. Of a pool the states of its sequences are read."""
    flops = 4 * chunks_of(inputs, size).tokens
    if (pool := inputs.get("state")) is None:
        return read_bytes(inputs), flops * int(inputs["initial_state"][:1].numel())
    numbers, states = 4 * (len(inputs["cu_seqlens"]) - 1), sequences_with_states(inputs) * total_bytes(pool[:1])
    return read_bytes(inputs, "state", "state_indices") + numbers + states, flops * int(pool[:1].numel())


@replay_rule("triton::chunk_gated_delta_rule_fwd_kernel_h_blockdim64")
class ChunkState(ReplayRule):
    """Keys of length one and states that decay, as in models: else they grow from chunk to chunk."""

    def prepare(self, bound: BoundCall) -> None:
        for name, scale in (("k", 1.0), ("w", 0.125)):
            unit = torch.nn.functional.normalize(torch.randn(bound.spec(name).shape), dim=-1)
            bound.set_content(name, scale * unit)
        if bound["initial_state_indices"] is not None:
            shrink_states(bound, ("initial_state",), "initial_state_indices")
            states = bound.content("initial_state_indices")
            if bound["stride_init_state"] is None and states is not None and (states < 0).any():
                raise Skip("its padding has no state, and the kernel would reach before the pool")
        offsets = bound.content("chunk_offsets")
        set_falling_gate(bound, None if offsets is None else indices_of(offsets, bound.spec("h").shape[1]))


@family("gdn_chunk_output", "triton::chunk_fwd_kernel_o")
def chunk_output(call: Invocation) -> KernelInstance:
    """`v`: the values that the state changes by; `h`: the state before each chunk."""
    inputs = {
        "q": joined(call, "q", *KEYS),
        "k": joined(call, "k", *KEYS),
        "v_new": joined(call, "v", *VALUES),
        "h": joined(call, "h", *STATES, description="The state before each chunk."),
        **gate_of(call),
        **sequences_of(call),
        "scale": scalar_arg(float(call.number("scale")), description="Scale of the queries."),
    }
    out = call.tensor("o")
    words = ("" if "gate" in inputs else "_nogate") + abbreviate(out.dtype, torch.bfloat16)
    return delta_kernel(
        call,
        "gdn_chunk_output",
        words,
        inputs,
        {"output": joined(call, "o", *VALUES)},
        OUTPUT,
        {"decay": OUTPUT_DECAY if "gate" in inputs else "", "dtype": dtype_name(out.dtype)},
        "The output of the gated delta rule: what the state before each chunk gives, and the tokens within it.",
        output_work,
    )


@counts_work("gdn_chunk_output")
def output_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    chunks, key, value = chunks_of(inputs, size), int(inputs["k"][:1].numel()), int(inputs["v_new"][:1].numel())
    state = int(inputs["h"][:1].numel())
    return read_bytes(inputs), 2 * (chunks.tokens * state + chunks.pairs * (key + value))


@valid_input("w", op_types=("gdn_chunk_state",))
def short_keys(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Shorter than one: a chunk with longer ones would make the state grow."""
    drawn = torch.randn(draft.shape(name), generator=draft.generator)
    return torch.nn.functional.normalize(drawn, dim=-1) / 8

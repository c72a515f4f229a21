"""mamba2_joined_last: the state that each sequence ends with, of chunks that hold several sequences; what draws these.

By SGLang's Triton kernel, after those of `joined_scan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kcap.schemas.derive.families import family, valid_input
from kcap.schemas.derive.families.recurrent.chunks import chunk_kernel, counts_work, some_of_each
from kcap.schemas.derive.families.recurrent.mamba2.chunked_scan import summed_decays, time_steps
from kcap.schemas.derive.families.recurrent.mamba2.joined_scan import GROUPS, PLACES, STATES, TOKENS, TYPES, words_of
from kcap.schemas.derive.invocation import Invocation, require_values, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, dtype_name, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft

LAST = """    assert x.shape[1:] == ({nheads}, {head_dim}) and B.shape[1:] == ({ngroups}, {dstate})
    lasts = torch.zeros((len(seq_ends), *x.shape[1:], {dstate}), dtype=torch.float32, device=x.device)
    for sequence, (begin, end) in enumerate(zip(seq_starts.tolist(), seq_ends.tolist())):
        chunk = (end - 1) // {chunk_size}
        base = chunk * {chunk_size}
        first, last, decay = max(begin - base, 0), end - base, dA_cumsum[:, chunk]
        weight = torch.exp(decay[:, last - 1 : last] - decay[:, first:last]) * dt[:, chunk, first:last]
        b = B[base + first : end].to(torch.float32).repeat_interleave({nheads} // {ngroups}, dim=1)
        b = (b * weight.mT[..., None]).to(x.dtype).to(torch.float32)
        state = torch.einsum("thd,ths->hds", x[base + first : end].to(torch.float32), b)
        if begin < base:
            state += states[chunk].to(torch.float32) * torch.exp(decay[:, last - 1])[:, None, None]
{initial}        lasts[sequence] = state
    return lasts.to(torch.{dtype})
"""
OWN_STATE = """        else:
            past = decay[:, first - 1] if first else torch.zeros_like(decay[:, 0])
            own = torch.exp(decay[:, last - 1] - past)[:, None, None]
            state += initial_states[sequence].to(torch.float32) * own
"""

LAST_TYPE = TYPES[-1]


@family("mamba2_joined_last", "triton::_chunk_state_varlen_kernel")
def joined_last(call: Invocation) -> KernelInstance:
    """`x_ptr`: [tokens, heads, channels], `chunk_states_ptr`: before each chunk, `states_ptr`: [sequences, heads,
    channels, dstate]."""
    x, b, dt, decays, before, states = (
        call.tensor(f"{name}_ptr") for name in ("x", "b", "dt", "dA_cumsum", "chunk_states", "states")
    )
    initial, bounds = call.optional("initstates_ptr"), call.tensor("cu_seqlens_ptr")
    inputs = {
        "x": tensor_arg(x, *TOKENS),
        "B": tensor_arg(b, *GROUPS),
        "dt": tensor_arg(dt, *PLACES),
        "dA_cumsum": tensor_arg(decays, *PLACES),
        "states": tensor_arg(before, *STATES, description="The state before each chunk."),
        "seq_starts": tensor_arg(bounds[:-1], "num_seqs", description="The first token of each sequence."),
        "seq_ends": tensor_arg(bounds[1:], "num_seqs", description="The token after the last of each sequence."),
    }
    if initial is not None:
        inputs["initial_states"] = tensor_arg(initial, "num_seqs", *STATES[1:])
    (_, h, d), (_, g, s), c = x.shape, b.shape, dt.shape[2]
    return chunk_kernel(
        f"mamba2_joined_last{words_of(x, initial, before)}_h{h}_d{d}_s{s}_ng{g}_c{c}",
        LAST_TYPE,
        {"nheads": h, "head_dim": d, "dstate": s, "ngroups": g, "chunk_size": c},
        inputs,
        {"last_states": tensor_arg(states, "num_seqs", *STATES[1:])},
        LAST,
        {"initial": "" if initial is None else OWN_STATE, "dtype": dtype_name(states.dtype)},
        "The state of Mamba-2 that each sequence ends with.",
        last_work,
    )


@counts_work(LAST_TYPE)
def last_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    """Of each sequence the tokens of its last chunk, and one state."""
    starts, ends = (
        require_values(inputs[f"seq_{side}"], "bounds of its sequences").cpu() for side in ("starts", "ends")
    )
    tokens = int((ends - torch.maximum(starts, (ends - 1) // size * size)).sum())
    x, b, states = inputs["x"], inputs["B"], inputs["states"]
    read = tokens * (total_bytes(x[:1], b[:1]) + 8 * x.shape[1]) + len(ends) * total_bytes(states[:1])
    return read, 2 * tokens * int(x[:1].numel()) * int(b.shape[2])


valid_input("dA_cumsum", op_types=TYPES)(summed_decays)
valid_input("dt", op_types=(TYPES[0], TYPES[3], LAST_TYPE))(time_steps)


@valid_input("seq_starts", op_types=(LAST_TYPE,))
def sequence_starts(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Of sequences one after another, each of a token or more where there are as many."""
    lengths = some_of_each(draft, draft.size("num_tokens") or 0, draft.shape(name)[0])
    return lengths.cumsum(0) - lengths


@valid_input("seq_ends", op_types=(LAST_TYPE,))
def sequence_ends(draft: WorkloadDraft, name: str) -> torch.Tensor:
    starts = draft["seq_starts"]
    return torch.cat([starts[1:], torch.full_like(starts[:1], draft.size("num_tokens") or 0)])


@valid_input("chunk_starts", "chunk_ends", op_types=TYPES)
def bounds_of_whole_chunks(draft: WorkloadDraft, name: str) -> torch.Tensor:
    size, tokens = draft.size("chunk_size") or 1, draft.size("num_tokens") or 0
    return ((torch.arange(draft.shape(name)[0]) + int(name == "chunk_ends")) * size).clamp(max=tokens)


@valid_input("seq_idx", op_types=TYPES)
def sequence_of_token(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Ascending. Where pieces of chunks are told, as many sequences begin within a chunk as there are more of these."""
    (tokens,), size = draft.shape(name), draft.size("chunk_size") or 1
    others = min(draft.size("num_seqs") or 2, tokens) - 1
    places = torch.arange(1, max(tokens, 1))
    pieces = draft.size("num_pieces")
    if pieces is None:
        begins = places[draft.distinct(others, len(places))]
    else:
        within, between = places[places % size > 0], places[places % size == 0]
        inside = min(max(pieces - -(-tokens // size), others - len(between)), others)
        begins = torch.cat(
            [part[draft.distinct(count, len(part))] for part, count in ((within, inside), (between, others - inside))]
        )
    sequences = torch.zeros(tokens, dtype=torch.int64)
    sequences[begins] = 1
    return sequences.cumsum(0)


@valid_input("chunk_indices", "chunk_offsets", op_types=TYPES)
def pieces_of_chunks(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """A piece begins with a chunk, and with a sequence."""
    sequences, size = draft["seq_idx"].cpu().long(), draft.size("chunk_size") or 1
    places = torch.arange(len(sequences))
    begins = places[(places % size == 0) | (sequences.diff(prepend=sequences[:1]) > 0)]
    pieces = torch.full((draft.shape(name)[0],), int(begins[-1]))
    pieces[: len(begins)] = begins[: len(pieces)]
    return pieces // size if name == "chunk_indices" else pieces % size

"""mamba2_joined_*: the chunked scan of Mamba-2's prefill as SGLang's Triton kernels compute it.

They have the names of vLLM's (`chunked_scan`), and are older: a chunk is `chunk_size` tokens whatever sequences these
are of, each token names its sequence, and products of two sequences are zero. States are those *before* each chunk.
Where a sequence has a state already, the output is made in pieces: the tokens of one sequence in one chunk. The state
that each sequence ends with has a kernel of its own (`last_states`). Tensors are of one batch, which is left out here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kcap.schemas.derive.families.recurrent.chunks import chunk_kernel, counts_work, place_bytes, read_bytes
from kcap.schemas.derive.invocation import Invocation, Unrecognized, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, dtype_name, tensor_arg

STATE = """    assert x.shape[1:] == ({nheads}, {head_dim}) and B.shape[1:] == ({ngroups}, {dstate})
    states = torch.zeros((dt.shape[1], *x.shape[1:], {dstate}), dtype=torch.float32, device=x.device)
    for chunk in range(-(-len(x) // {chunk_size})):
        start, end = chunk * {chunk_size}, min((chunk + 1) * {chunk_size}, len(x))
        decay, step = dA_cumsum[:, chunk], dt[:, chunk, : end - start]
        weight = torch.exp(decay[:, -1:] - decay[:, : end - start]) * step
        weight = torch.where(seq_idx[start:end] == seq_idx[end - 1], weight, 0.0)
        b = B[start:end].to(torch.float32).repeat_interleave({nheads} // {ngroups}, dim=1)
        b = (b * weight.mT[..., None]).to(x.dtype).to(torch.float32)
        states[chunk] = torch.einsum("thd,ths->hds", x[start:end].to(torch.float32), b)
    return states.to(torch.{dtype})
"""

PASSING = """    assert states.shape[1:] == ({nheads}, {state_size}) and dA_cumsum.shape[2] == {chunk_size}
    before = torch.zeros(states.shape, dtype=torch.float32, device=states.device)
    sequences, previous, piece = seq_idx.tolist(), 0, 0
    state = {first}
    for chunk in range(len(states)):
        before[chunk] = state
        decay = dA_cumsum[:, chunk, -1]
        last = sequences[min((chunk + 1) * {chunk_size}, len(sequences)) - 1]
{changed}        state = torch.exp(decay)[:, None] * state + states[chunk].to(torch.float32)
        previous = last
    return before.to(torch.{dtype}), state
"""
FORGETS = """        if last != previous:
            state = torch.zeros_like(state)
"""
STARTS_ANEW = """        if last != previous:
            state = initial_states[last].to(torch.float32)
            piece += last - sequences[chunk * {chunk_size}]
            offset = int(chunk_offsets[piece]) if piece < len(chunk_offsets) else 0
            if offset > 0:
                decay = decay - dA_cumsum[:, chunk, offset - 1]
        piece += 1
"""

BMM = """    assert C.shape[1:] == B.shape[1:] == ({ngroups}, {dstate})
    shape = (len(chunk_starts), {ngroups}, {chunk_size}, {chunk_size})
    products = torch.zeros(shape, dtype=torch.float32, device=C.device)
{each_chunk}        c, b = (m[start:end].to(torch.float32) for m in (C, B))
        same = seq_idx[start:end, None] == seq_idx[start:end]
        products[chunk, :, : end - start, : end - start] = torch.einsum("igs,jgs->gij", c, b) * same
    return products.to(torch.{dtype})
"""

SCAN = """    assert x.shape[1:] == ({nheads}, {head_dim}) and C.shape[1:] == ({ngroups}, {dstate})
    output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    sequences = seq_idx.tolist()
{pieces}        rows = slice(chunk * {chunk_size} + start, chunk * {chunk_size} + end)
        decay, step = (m[:, chunk, start:end].to(torch.float32) for m in (dA_cumsum, dt))
        previous = sequences[chunk * {chunk_size} - 1] if chunk else 0
{before}        c = C[rows].to(torch.float32).repeat_interleave({nheads} // {ngroups}, dim=1)
        y = torch.einsum("ths,hds->thd", c, state.to(C.dtype).to(torch.float32)) * scale.mT[..., None]
        scores = cb[chunk, :, start:end, start:end].to(torch.float32).repeat_interleave({nheads} // {ngroups}, dim=0)
        scores = scores * torch.exp(decay[:, :, None] - decay[:, None, :]) * step[:, None]
        earlier = torch.ones(end - start, end - start, dtype=torch.bool, device=x.device).tril()
        scores = torch.where(earlier, scores, 0.0).to(x.dtype).to(torch.float32)
        value = x[rows].to(torch.float32)
        output[rows] = y + torch.einsum("hij,jhd->ihd", scores, value){skip}
    return output.to(torch.{dtype})
"""
WHOLE_CHUNKS = """    for chunk in range(cb.shape[0]):
        start, end = 0, min({chunk_size}, len(x) - chunk * {chunk_size})
"""
ONE_STATE = """        state, continued = states[chunk], seq_idx[rows] == previous
        scale = torch.where(continued, torch.exp(decay), 0.0)
"""
PIECES = """    chunks, offsets = chunk_indices.tolist(), chunk_offsets.tolist()
    for piece, (chunk, start) in enumerate(zip(chunks, offsets)):
        end = min({chunk_size}, len(x) - chunk * {chunk_size})
        if chunks[piece + 1 : piece + 2] == [chunk]:
            end = min(end, offsets[piece + 1])
"""
STATE_OF_EACH = """        sequence = sequences[rows.start]
        state = states[chunk] if start == 0 and sequence == previous else initial_states[sequence]
        scale = torch.exp(decay - (dA_cumsum[:, chunk, start - 1 : start] if start else 0.0))
"""

TOKENS, GROUPS = ("num_tokens", "nheads", "head_dim"), ("num_tokens", "ngroups", "dstate")
PLACES, PRODUCTS = ("nheads", "num_chunks", "chunk_size"), ("num_chunks", "ngroups", "chunk_size", "chunk_size")
STATES, FLAT = ("num_chunks", "nheads", "head_dim", "dstate"), ("num_chunks", "nheads", "state_size")
SEQUENCES = "The sequence of each token."
NO_BOUNDS = "where its chunks begin is no argument of the operator"
TYPES = tuple(f"mamba2_joined_{part}" for part in ("state", "passing", "bmm", "scan", "last"))


def of_batch(call: Invocation, name: str) -> torch.Tensor:
    """The tensor called `name` without the batch, which is one."""
    tensor = call.tensor(f"{name}_ptr")
    if tensor.shape[0] != 1:
        raise Unrecognized("several batches")
    return tensor[0]


def sequences_arg(call: Invocation) -> TensorArg:
    return tensor_arg(of_batch(call, "seq_idx"), "num_tokens", description=SEQUENCES)


def places_args(call: Invocation) -> dict[str, TensorArg]:
    return {name: tensor_arg(of_batch(call, name), *PLACES) for name in ("dt", "dA_cumsum")}


def pieces_args(call: Invocation, *names: str) -> dict[str, TensorArg]:
    texts = {"chunk_indices": "The chunk of each piece.", "chunk_offsets": "Where each piece begins in its chunk."}
    return {name: tensor_arg(call.tensor(f"{name}_ptr"), "num_pieces", description=texts[name]) for name in names}


def words_of(x: torch.Tensor, initial: torch.Tensor | None, *states: torch.Tensor) -> str:
    words = ("" if initial is not None else "_noinitial") + abbreviate(x.dtype, torch.bfloat16)
    return words + "".join(abbreviate(state.dtype, torch.float32).replace("_", "_state") for state in states)


def bounds_of_chunks(tokens: int, size: int) -> torch.Tensor:
    """Where each chunk begins, and where the last one ends, which no argument says."""
    return (torch.arange(-(-tokens // size) + 1, dtype=torch.int32) * size).clamp(max=tokens)


def with_bounds(call: Invocation) -> Invocation:
    """Time steps are the same as vLLM's, whose kernel is told where chunks begin."""
    tensors = {f"{name}_ptr": of_batch(call, name) for name in ("dt", "dt_out", "dA_cumsum")}
    bounds = bounds_of_chunks(len(tensors["dt_ptr"]), tensors["dt_out_ptr"].shape[2])
    return Invocation(call.operator, {**call.arguments, **tensors, "cu_chunk_seqlens_ptr": bounds})


def joined_state(call: Invocation) -> KernelInstance:
    """`x_ptr`: [1, tokens, heads, channels], `states_ptr`: [1, chunks, heads, channels, dstate]."""
    x, b, states = (of_batch(call, name) for name in ("x", "b", "states"))
    (_, h, d), (_, g, s) = x.shape, b.shape
    places = places_args(call)
    c = places["dt"].value.shape[2]
    return chunk_kernel(
        f"mamba2_joined_state{words_of(x, x, states)}_h{h}_d{d}_s{s}_ng{g}_c{c}",
        TYPES[0],
        {"nheads": h, "head_dim": d, "dstate": s, "ngroups": g, "chunk_size": c},
        {"x": tensor_arg(x, *TOKENS), "B": tensor_arg(b, *GROUPS), **places, "seq_idx": sequences_arg(call)},
        {"states": tensor_arg(states, *STATES, description="The state that each chunk adds.")},
        STATE,
        {"dtype": dtype_name(states.dtype)},
        "What each chunk adds to the state of Mamba-2 of the sequence that is its last.",
        state_work,
    )


def state_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    x = inputs["x"]
    read = read_bytes(inputs, "dt", "dA_cumsum") + place_bytes(inputs, len(x))
    return read, 2 * x.numel() * int(inputs["B"].shape[2])


counts_work(TYPES[0])(state_work)


def joined_passing(call: Invocation) -> KernelInstance:
    """`states_ptr`, `out_ptr`: [1, chunks, heads, state size], `initstates_ptr`: [sequences, heads, state size]."""
    states, out, final, decays = (of_batch(call, name) for name in ("states", "out", "final_states", "dA_cs"))
    initial = call.optional("initstates_ptr")
    if initial is not None and call["IS_CONT_BATCHED"] is not True:
        raise Unrecognized("its states are not of sequences")
    inputs = {
        "states": tensor_arg(states, *FLAT, description="The state that each chunk adds."),
        "dA_cumsum": tensor_arg(decays, *PLACES),
        "seq_idx": sequences_arg(call),
    }
    if initial is not None:
        inputs["initial_states"] = tensor_arg(initial, "num_seqs", *FLAT[1:])
        inputs |= pieces_args(call, "chunk_offsets")
    (_, h, n), c = states.shape, decays.shape[2]
    zeros = "torch.zeros(states.shape[1:], dtype=torch.float32, device=states.device)"
    return chunk_kernel(
        f"mamba2_joined_passing{words_of(out, initial, states)}_h{h}_n{n}_c{c}",
        TYPES[1],
        {"nheads": h, "state_size": n, "chunk_size": c},
        inputs,
        {
            "before": tensor_arg(out, *FLAT, description="The state before each chunk."),
            "final_state": tensor_arg(final, *FLAT[1:], description="The state after the last chunk."),
        },
        PASSING,
        {
            "first": "initial_states[0].to(torch.float32)" if initial is not None else zeros,
            "changed": FORGETS if initial is None else STARTS_ANEW.format(chunk_size=c),
            "dtype": dtype_name(out.dtype),
        },
        "The states of Mamba-2 before each chunk, passed on along each sequence.",
        passing_work,
    )


@counts_work(TYPES[1])
def passing_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    """Of the decays a chunk's last is read, of the sequences two of each chunk."""
    chunks = len(inputs["states"])
    tables = inputs["dA_cumsum"][..., 0].numel() * 4 + 2 * chunks * inputs["seq_idx"].element_size()
    return read_bytes(inputs, "dA_cumsum", "seq_idx") + tables, 2 * inputs["states"].numel()


def joined_bmm(call: Invocation) -> KernelInstance:
    """`a_ptr`, `b_ptr`: C and B, [1, tokens, groups, dstate]."""
    call.refuse("IS_CAUSAL")
    c_matrix, b, out = (of_batch(call, name) for name in ("a", "b", "out"))
    if c_matrix.dtype != b.dtype:
        raise Unrecognized("it rounds one of its matrices")
    (tokens, g, s), c = b.shape, out.shape[3]
    bounds = bounds_of_chunks(tokens, c)
    kernel = chunk_kernel(
        f"mamba2_joined_bmm{words_of(b, b)}_ng{g}_s{s}_c{c}",
        TYPES[2],
        {"ngroups": g, "dstate": s, "chunk_size": c},
        {
            "C": tensor_arg(c_matrix, *GROUPS),
            "B": tensor_arg(b, *GROUPS),
            "seq_idx": sequences_arg(call),
            "chunk_starts": tensor_arg(bounds[:-1], "num_chunks", description="The first token of each chunk."),
            "chunk_ends": tensor_arg(bounds[1:], "num_chunks", description="The token after the last of each chunk."),
        },
        {"cb": tensor_arg(out, *PRODUCTS)},
        BMM,
        {"dtype": dtype_name(out.dtype)},
        "The products of C and B of all pairs of tokens of each chunk that are of one sequence.",
        bmm_work,
    )
    return replace(kernel, engine_form=NO_BOUNDS)


@counts_work(TYPES[2])
def bmm_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    lengths = bounds_of_chunks(len(inputs["B"]), size).diff().long()
    return read_bytes(inputs), 2 * int((lengths**2).sum()) * inputs["B"][:1].numel()


def joined_scan(call: Invocation) -> KernelInstance:
    """`states_ptr`: before each chunk; `seq_idx_ptr`: [1, tokens]; `D_ptr`: [heads] or [heads, channels]."""
    call.refuse("z_ptr")
    if call["IS_CAUSAL"] is not True:
        raise Unrecognized("it is not causal, or its constants are not known")
    x, c_matrix, out, cb, states = (of_batch(call, name) for name in ("x", "C", "out", "cb", "states"))
    initial, skip, places = call.optional("initstates_ptr"), call.optional("D_ptr"), places_args(call)
    inputs = {
        "cb": tensor_arg(cb, *PRODUCTS),
        "x": tensor_arg(x, *TOKENS),
        **places,
        "C": tensor_arg(c_matrix, *GROUPS),
        "states": tensor_arg(states, *STATES, description="The state before each chunk."),
        "seq_idx": sequences_arg(call),
    }
    if skip is not None:
        inputs["D"] = tensor_arg(skip, *TOKENS[1 : 1 + skip.dim()])
    if initial is not None:
        inputs["initial_states"] = tensor_arg(initial, "num_seqs", *STATES[1:])
        inputs |= pieces_args(call, "chunk_indices", "chunk_offsets")
    (_, h, d), (_, g, s), c = x.shape, c_matrix.shape, cb.shape[3]
    added = " + D.to(torch.float32)" + ("[:, None]" if skip is not None and skip.dim() == 1 else "") + " * value"
    word = ("" if skip is not None else "_noD") + ("_Dhdim" if skip is not None and skip.dim() == 2 else "")
    return chunk_kernel(
        f"mamba2_joined_scan{word}{words_of(x, initial, states)}_h{h}_d{d}_s{s}_ng{g}_c{c}",
        TYPES[3],
        {"nheads": h, "head_dim": d, "dstate": s, "ngroups": g, "chunk_size": c},
        inputs,
        {"output": tensor_arg(out, *TOKENS)},
        SCAN,
        {
            "pieces": (WHOLE_CHUNKS if initial is None else PIECES).format(chunk_size=c),
            "before": ONE_STATE if initial is None else STATE_OF_EACH,
            "skip": added if skip is not None else "",
            "dtype": dtype_name(out.dtype),
        },
        "The output of Mamba-2 in chunks: what the state before each chunk gives, and the tokens within it.",
        scan_work,
    )


@counts_work(TYPES[3])
def scan_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    """Of the products each token's with those before it in its chunk; a state for each chunk, or each piece of one."""
    x, cb, states, initial = inputs["x"], inputs["cb"], inputs["states"], inputs.get("initial_states")
    lengths = bounds_of_chunks(len(x), size).diff().long()
    pairs = int((lengths * (lengths + 1) // 2).sum())
    read = read_bytes(inputs, "cb", "dt", "dA_cumsum", "states", "initial_states") + place_bytes(inputs, len(x))
    read += pairs * cb.shape[1] * cb.element_size()
    pieces = len(states) if initial is None else min(len(inputs["chunk_indices"]), len(states) + len(initial))
    read += pieces * total_bytes(states[:1])
    return read, 2 * x.numel() * int(states.shape[3]) + 2 * pairs * int(x[:1].numel())

"""mamba2_*: the chunked scan of Mamba-2's prefill (arXiv:2405.21060, section 6), by vLLM's Triton kernels.

In the order in which vLLM launches them (`ssd_combined.py` of 0.22.1 and 0.32): the time steps and the decays within
each chunk, the state that each chunk adds, the states passed on from chunk to chunk, the products of C and B within
each chunk, the output. Tensors of tokens are [tokens, heads, channels], those of chunks have `chunk_size` places for
each chunk, of which a shorter chunk fills the first. Products round their factors as the kernels do where the result
is float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kcap.schemas.derive.cost import distinct_bytes
from kcap.schemas.derive.families import family, valid_input
from kcap.schemas.derive.families.recurrent.chunks import (
    SCAN_TYPES,
    chunk_kernel,
    chunks_of,
    counts_work,
    forgetting_rates,
    place_bytes,
    read_bytes,
)
from kcap.schemas.derive.families.recurrent.mamba2.joined_scan import (
    NO_BOUNDS,
    joined_bmm,
    joined_passing,
    joined_scan,
    joined_state,
    with_bounds,
)
from kcap.schemas.derive.invocation import Invocation, Unrecognized, require_values
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, dtype_name, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft

CUMSUM = """    assert dt.shape[1] == {nheads}
    steps = torch.zeros(({nheads}, len(chunk_starts), {chunk_size}), dtype=torch.float32, device=dt.device)
{each_chunk}        step = dt[start:end].to(torch.float32){bias}
        steps[:, chunk, : end - start] = {step}.mT
    return steps, (steps * A.to(torch.float32)[:, None, None]).cumsum(-1)
"""

STATE = """    assert x.shape[1:] == ({nheads}, {head_dim}) and B.shape[1:] == ({ngroups}, {dstate})
    assert dt.shape[2] == dA_cumsum.shape[2] == {chunk_size}
    states = torch.zeros((len(chunk_starts), *x.shape[1:], {dstate}), dtype=torch.float32, device=x.device)
{each_chunk}        decay, step = (m[:, chunk].to(torch.float32) for m in (dA_cumsum, dt))
        weight = torch.exp2((decay[:, -1:] - decay).clamp(max=0.0) * {log2_e!r}) * step
        b = B[start:end].to(torch.float32).repeat_interleave({nheads} // {ngroups}, dim=1)
        b = (b * weight[:, : end - start].mT[..., None]).to(x.dtype).to(torch.float32)
        states[chunk] = torch.einsum("thd,ths->hds", x[start:end].to(torch.float32), b)
    return states.to(torch.{dtype})
"""

PASSING = """    assert states.shape[1:] == ({nheads}, {state_size}) and dA_cumsum.shape[2] == {chunk_size}
    passed = torch.zeros(states.shape, dtype=torch.float32, device=states.device)
    lasts = last_chunk_indices.tolist()
    for sequence, last in enumerate(lasts):
        state = {initial}
        for chunk in range(lasts[sequence - 1] + 1 if sequence else 0, last + 1):
            decay = torch.exp(dA_cumsum[:, chunk, -1].to(torch.float32))
            state = decay[:, None] * state + states[chunk].to(torch.float32)
            passed[chunk] = state
    return {returned}
"""

BMM = """    assert C.shape[1:] == B.shape[1:] == ({ngroups}, {dstate})
    shape = (len(chunk_starts), {ngroups}, {chunk_size}, {chunk_size})
    products = torch.zeros(shape, dtype=torch.float32, device=C.device)
{each_chunk}        c, b = (m[start:end].to(torch.float32) for m in (C, B))
        products[chunk, :, : end - start, : end - start] = torch.einsum("igs,jgs->gij", c, b)
    return products.to(torch.{dtype})
"""

SCAN = """    assert x.shape[1:] == ({nheads}, {head_dim}) and C.shape[1:] == ({ngroups}, {dstate})
    assert dt.shape[2] == dA_cumsum.shape[2] == {chunk_size}
    output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    sequences = seq_idx.tolist()
{each_chunk}        decay, step = (m[:, chunk, : end - start].to(torch.float32) for m in (dA_cumsum, dt))
        value = x[start:end].to(torch.float32)
        c = C[start:end].to(torch.float32).repeat_interleave({nheads} // {ngroups}, dim=1)
        if chunk and sequences[chunk] == sequences[chunk - 1]:
            state = states[chunk - 1]
        else:
            state = {initial}
        y = torch.einsum("ths,hds->thd", c, state.to(torch.float32)) * torch.exp(decay).mT[..., None]
        scores = cb[chunk, :, : end - start, : end - start].to(torch.float32)
        between = torch.exp((decay[:, :, None] - decay[:, None, :]).clamp(max=0.0)) * step[:, None]
        scores = scores.repeat_interleave({nheads} // {ngroups}, dim=0) * between
        y = y + torch.einsum("hij,jhd->ihd", scores.tril(), value){skip}
        output[start:end] = y{gate}
    return output.to(torch.{dtype})
"""

TOKENS, GROUPS = ("total_tokens", "nheads", "head_dim"), ("total_tokens", "ngroups", "dstate")
PLACES = ("nheads", "num_chunks", "chunk_size")
STATES = ("num_chunks", "nheads", "head_dim", "dstate")
FLAT = ("num_chunks", "nheads", "state_size")
INITIAL = "The state that each sequence begins with."


def bounds_of(call: Invocation) -> dict[str, TensorArg]:
    """Where each chunk begins and ends, of `cu_chunk_seqlens_ptr`, int32 [num_chunks + 1]."""
    bounds = call.tensor("cu_chunk_seqlens_ptr")
    return {
        "chunk_starts": tensor_arg(bounds[:-1], "num_chunks", description="The first token of each chunk."),
        "chunk_ends": tensor_arg(bounds[1:], "num_chunks", description="The token after the last of each chunk."),
    }


def of_sglang(kernel: KernelInstance) -> KernelInstance:
    """SGLang's older kernels of the same names are a family of their own: they are not told where chunks begin."""
    return replace(kernel, family=kernel.op_type)


@family("mamba2_chunk_cumsum", "triton::_chunk_cumsum_fwd_kernel")
def chunk_cumsum(call: Invocation) -> KernelInstance:
    """`dt_ptr`: [tokens, heads], `A_ptr`, `dt_bias_ptr`: [heads]; outputs float32 [heads, chunks, chunk size]."""
    if call.optional("cu_chunk_seqlens_ptr") is None:
        return replace(chunk_cumsum(with_bounds(call)), engine_form=NO_BOUNDS)
    dt, steps, decays = (call.tensor(name) for name in ("dt_ptr", "dt_out_ptr", "dA_cumsum_ptr"))
    bias, softplus = call.optional("dt_bias_ptr"), call["DT_SOFTPLUS"]
    limits = {"min": call["dt_min"], "max": call["dt_max"]}
    if not isinstance(softplus, bool) or not all(isinstance(limit, int | float) for limit in limits.values()):
        raise Unrecognized("its constants are not known")
    if steps.dtype != torch.float32 or decays.dtype != torch.float32:
        raise Unrecognized("its outputs are no float32")
    inputs = {
        "dt": tensor_arg(dt, *TOKENS[:2], description="Time step, before bias and softplus."),
        "A": tensor_arg(call.tensor("A_ptr"), "nheads", description="The state decays by exp(A dt)."),
    }
    if bias is not None:
        inputs["dt_bias"] = tensor_arg(bias, "nheads")
    inputs |= bounds_of(call)
    h, _, c = steps.shape
    limits = {name: limit for name, limit in limits.items() if math.isfinite(limit)}
    clamp = ", ".join(f"{name}={limit!r}" for name, limit in limits.items())
    step = ("torch.nn.functional.softplus(step)" if softplus else "step") + (f".clamp({clamp})" if clamp else "")
    words = ("" if bias is not None else "_nobias") + ("" if softplus else "_nosoftplus")
    words += "".join(f"_{name}{limit:g}" for name, limit in limits.items() if (name, limit) != ("min", 0))
    return chunk_kernel(
        f"mamba2_chunk_cumsum{words}{abbreviate(dt.dtype, torch.bfloat16)}_h{h}_c{c}",
        "mamba2_chunk_cumsum",
        {"nheads": h, "chunk_size": c},
        inputs,
        {
            "dt_out": tensor_arg(steps, *PLACES, description="Time steps of each chunk; 0 after its last token."),
            "dA_cumsum": tensor_arg(decays, *PLACES, description="The logarithm of the decay in each chunk."),
        },
        CUMSUM,
        {"step": step, "bias": " + dt_bias.to(torch.float32)" if bias is not None else ""},
        "Time steps of Mamba-2, and their decays summed within each chunk.",
        cumsum_work,
    )


@counts_work("mamba2_chunk_cumsum")
def cumsum_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    return read_bytes(inputs), 2 * inputs["dt"].numel()


@family("mamba2_chunk_state", "triton::_chunk_state_fwd_kernel")
def chunk_state(call: Invocation) -> KernelInstance:
    """`x_ptr`: [tokens, heads, channels], `b_ptr`: [tokens, groups, dstate], `states_ptr`: [chunks, heads, channels,
    dstate].
    """
    if call.optional("cu_chunk_seqlens_ptr") is None:
        return of_sglang(joined_state(call))
    x, b, dt, states = (call.tensor(f"{name}_ptr") for name in ("x", "b", "dt", "states"))
    inputs = {
        "x": tensor_arg(x, *TOKENS),
        "B": tensor_arg(b, *GROUPS),
        "dt": tensor_arg(dt, *PLACES),
        "dA_cumsum": tensor_arg(call.tensor("dA_cumsum_ptr"), *PLACES),
        **bounds_of(call),
    }
    (_, h, d), (_, g, s), c = x.shape, b.shape, dt.shape[2]
    words = abbreviate(x.dtype, torch.bfloat16) + abbreviate(states.dtype, torch.float32).replace("_", "_state")
    return chunk_kernel(
        f"mamba2_chunk_state{words}_h{h}_d{d}_s{s}_ng{g}_c{c}",
        "mamba2_chunk_state",
        {"nheads": h, "head_dim": d, "dstate": s, "ngroups": g, "chunk_size": c},
        inputs,
        {"states": tensor_arg(states, *STATES, description="The state that each chunk adds.")},
        STATE,
        {"dtype": dtype_name(states.dtype), "log2_e": math.log2(math.e)},
        "The state of Mamba-2 after each chunk, had it been zero before.",
        state_work,
    )


@counts_work("mamba2_chunk_state")
def state_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    chunks = chunks_of(inputs, size)
    read = read_bytes(inputs, "dt", "dA_cumsum") + place_bytes(inputs, chunks.tokens)
    return read, 2 * chunks.tokens * int(inputs["x"][:1].numel()) * int(inputs["B"].shape[2])


@family("mamba2_state_passing", "triton::_state_passing_fwd_kernel")
def state_passing(call: Invocation) -> KernelInstance:
    """`states_ptr`, `out_ptr`: [chunks, heads, state size], `initstates_ptr`: [sequences, heads, state size].

    Since vLLM 0.33 each sequence's last state is put into a cache, `final_states_ptr`: [states, heads, state size].
    """
    if call.optional("last_chunk_indices_ptr") is None:
        return of_sglang(joined_passing(call))
    states, out, decays = (call.tensor(name) for name in ("states_ptr", "out_ptr", "dA_cs_ptr"))
    initial, lasts = call.optional("initstates_ptr"), call.tensor("last_chunk_indices_ptr")
    inputs = {
        "states": tensor_arg(states, *FLAT, description="The state that each chunk adds."),
        "dA_cumsum": tensor_arg(decays, *PLACES),
        "last_chunk_indices": tensor_arg(lasts, "num_seqs", description="The last chunk of each sequence."),
    }
    if initial is not None:
        inputs["initial_states"] = tensor_arg(initial, "num_seqs", *FLAT[1:], description=INITIAL)
    outputs = {"passed": tensor_arg(out, *FLAT, description="The state after each chunk.")}
    if (cache := call.optional("final_states_ptr")) is not None:
        at = call.tensor("final_state_indices_ptr")
        outputs["final_states"] = lazy_arg(cache.dtype, ("num_seqs", *FLAT[1:]), lambda: cache[at.long()])
    (_, h, n), c = states.shape, decays.shape[2]
    words = ("" if initial is not None else "_noinitial") + ("" if cache is None else "_final")
    words += abbreviate(states.dtype, torch.float32) + abbreviate(out.dtype, states.dtype).replace("_", "_out")
    returned = f"passed.to(torch.{dtype_name(out.dtype)})"
    if cache is not None:
        returned += f", passed[lasts].to(torch.{dtype_name(cache.dtype)})"
    zeros = "torch.zeros(states.shape[1:], dtype=torch.float32, device=states.device)"

    return chunk_kernel(
        f"mamba2_state_passing{words}_h{h}_n{n}_c{c}",
        "mamba2_state_passing",
        {"nheads": h, "state_size": n, "chunk_size": c},
        inputs,
        outputs,
        PASSING,
        {
            "initial": "initial_states[sequence].to(torch.float32)" if initial is not None else zeros,
            "returned": returned,
        },
        "The states of Mamba-2 after each chunk, passed on along each sequence.",
        passing_work,
    )


@counts_work("mamba2_state_passing")
def passing_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    """Of the decays only a chunk's last is read."""
    states, decays = inputs["states"], inputs["dA_cumsum"]
    return read_bytes(inputs, "dA_cumsum") + decays[..., 0].numel() * decays.element_size(), 2 * states.numel()


@family("mamba2_chunk_bmm", "triton::_bmm_chunk_fwd_kernel")
def chunk_bmm(call: Invocation) -> KernelInstance:
    """`a_ptr`, `b_ptr`: C and B, [tokens, groups, dstate]; `out_ptr`: [chunks, groups, chunk size, chunk size]."""
    if call.optional("cu_chunk_seqlens_ptr") is None:
        return of_sglang(joined_bmm(call))
    call.refuse("IS_CAUSAL")
    c_matrix, b, out = (call.tensor(name) for name in ("a_ptr", "b_ptr", "out_ptr"))
    if c_matrix.dtype != b.dtype:
        raise Unrecognized("it rounds one of its matrices")
    inputs = {"C": tensor_arg(c_matrix, *GROUPS), "B": tensor_arg(b, *GROUPS), **bounds_of(call)}
    (_, g, s), c = b.shape, out.shape[3]
    words = abbreviate(b.dtype, torch.bfloat16) + abbreviate(out.dtype, torch.float32).replace("_", "_out")
    return chunk_kernel(
        f"mamba2_chunk_bmm{words}_ng{g}_s{s}_c{c}",
        "mamba2_chunk_bmm",
        {"ngroups": g, "dstate": s, "chunk_size": c},
        inputs,
        {"cb": tensor_arg(out, "num_chunks", "ngroups", "chunk_size", "chunk_size")},
        BMM,
        {"dtype": dtype_name(out.dtype)},
        "The products of C and B of all pairs of tokens of each chunk.",
        bmm_work,
    )


@counts_work("mamba2_chunk_bmm")
def bmm_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    lengths = chunks_of(inputs, size).lengths
    return read_bytes(inputs), 2 * int((lengths * lengths).sum()) * int(inputs["B"][:1].numel())


@family("mamba2_chunk_scan", "triton::_chunk_scan_fwd_kernel")
def chunk_scan(call: Invocation) -> KernelInstance:
    """`cb_ptr`: of `_bmm_chunk_fwd_kernel`; `states_ptr`: after each chunk; `seq_idx_ptr`: the sequence of each chunk.

    `D_ptr`: [heads] or [heads, channels].
    """
    if call.optional("cu_chunk_seqlens_ptr") is None:
        return of_sglang(joined_scan(call))
    if call["IS_CAUSAL"] is not True:
        raise Unrecognized("it is not causal, or its constants are not known")
    x, out, dt, c_matrix = (call.tensor(name) for name in ("x_ptr", "out_ptr", "dt_ptr", "C_ptr"))
    states, initial = call.tensor("states_ptr"), call.optional("initstates_ptr")
    inputs = {
        "cb": tensor_arg(call.tensor("cb_ptr"), "num_chunks", "ngroups", "chunk_size", "chunk_size"),
        "x": tensor_arg(x, *TOKENS),
        "dt": tensor_arg(dt, *PLACES),
        "dA_cumsum": tensor_arg(call.tensor("dA_cumsum_ptr"), *PLACES),
        "C": tensor_arg(c_matrix, *GROUPS),
        "states": tensor_arg(states, *STATES, description="The state after each chunk."),
        "seq_idx": tensor_arg(call.tensor("seq_idx_ptr"), "num_chunks", description="The sequence of each chunk."),
        **bounds_of(call),
    }
    skip, gate = call.optional("D_ptr"), call.optional("z_ptr")
    if skip is not None:
        inputs["D"] = tensor_arg(skip, *TOKENS[1 : 1 + skip.dim()])
    if gate is not None:
        inputs["z"] = tensor_arg(gate, *TOKENS)
    if initial is not None:
        inputs["initial_states"] = tensor_arg(initial, "num_seqs", *STATES[1:], description=INITIAL)
    (_, h, d), (_, g, s), c = x.shape, c_matrix.shape, dt.shape[2]
    words = ("_z" if gate is not None else "") + ("" if skip is not None else "_noD")
    words += ("_Dhdim" if skip is not None and skip.dim() == 2 else "") + ("" if initial is not None else "_noinitial")
    words += abbreviate(x.dtype, torch.bfloat16) + abbreviate(states.dtype, x.dtype).replace("_", "_state")
    added = " + D.to(torch.float32)" + ("[:, None]" if skip is not None and skip.dim() == 1 else "") + " * value"

    return chunk_kernel(
        f"mamba2_chunk_scan{words}_h{h}_d{d}_s{s}_ng{g}_c{c}",
        "mamba2_chunk_scan",
        {"nheads": h, "head_dim": d, "dstate": s, "ngroups": g, "chunk_size": c},
        inputs,
        {"output": tensor_arg(out, *TOKENS)},
        SCAN,
        {
            "initial": "torch.zeros_like(states[chunk])" if initial is None else "initial_states[sequences[chunk]]",
            "skip": added if skip is not None else "",
            "gate": " * torch.nn.functional.silu(z[start:end].to(torch.float32))" if gate is not None else "",
            "dtype": dtype_name(out.dtype),
        },
        "The output of Mamba-2 in chunks: what the state before each chunk gives, and the tokens within it.",
        scan_work,
    )


@counts_work("mamba2_chunk_scan")
def scan_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    """Each token reads the state before its chunk, if there is one, and the tokens before it in the chunk."""
    x, cb, states = inputs["x"], inputs["cb"], inputs["states"]
    chunks = chunks_of(inputs, size)
    sequences = require_values(inputs["seq_idx"], "sequences of its chunks").cpu()
    initial = inputs.get("initial_states")
    continued = torch.cat([torch.zeros(1, dtype=torch.bool), sequences.diff() == 0])[: len(sequences)]
    with_state = int(chunks.lengths[continued].sum()) if initial is None else chunks.tokens
    read = read_bytes(inputs, "cb", "dt", "dA_cumsum", "states") + place_bytes(inputs, chunks.tokens)
    read += int(continued.sum()) * distinct_bytes(states[:1]) + chunks.pairs * cb.shape[1] * cb.element_size()
    row = int(x[:1].numel())
    return read, 2 * row * (with_state * int(states.shape[3]) + chunks.pairs)


@valid_input("dA_cumsum", op_types=(*SCAN_TYPES, "mamba2_state_passing"))
def summed_decays(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Falling from place to place of a chunk."""
    heads, *rest = draft.shape(name)
    rates = forgetting_rates(draft, heads, *[1] * len(rest))
    return draft.reals(-0.1, 0.0, (heads, *rest)).mul(rates).cumsum(-1)


@valid_input("dt", op_types=("mamba2_chunk_state", "mamba2_chunk_scan", "mamba2_scan"))
def time_steps(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Positive: a softplus was taken."""
    return draft.reals(0.0, 0.1, draft.shape(name))

"""gdn_chunk_*: the gated delta rule of a prefill in chunks (arXiv:2412.06464), by Flash Linear Attention's kernels.

In the order in which vLLM launches them for Qwen3-Next (`chunk.py` of 0.22.1 and 0.32): the logarithms of the decays
summed within each chunk (`gate`); K Kᵀ below the diagonal, scaled by rate and decay; the inverse of one and that (in
SGLang 0.5.15 and 0.5.23 one kernel makes it from the keys); the keys and values by which a chunk changes the state (the
WY representation). The states and the output that come of these are in `chunked_delta_state`. Tensors are [1, tokens,
heads, size], the sequences of a batch joined. Products round their factors as the kernels do where the result is
float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.families import ReplayRule, family, replay_rule, valid_input
from kcap.schemas.derive.families.recurrent.chunks import (
    DELTA_TYPES,
    Chunks,
    Work,
    chunk_kernel,
    chunks_of,
    counts_work,
    forgetting_rates,
    read_bytes,
)
from kcap.schemas.derive.invocation import Invocation, Unrecognized
from kcap.schemas.derive.kernel import (
    KernelInstance,
    TensorArg,
    abbreviate,
    dtype_name,
    lazy_arg,
    tensor_arg,
)
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.recording.values import TensorSpec

CUMSUM = """    assert g.shape[1] == {num_v_heads}
    gate = torch.zeros(g.shape, dtype=torch.float32, device=g.device)
{each_chunk}        gate[start:end] = g[start:end].to(torch.float32).cumsum(0)
    return gate.to(torch.{dtype})
"""

KKT = """    assert k.shape[1:] == ({num_k_heads}, {head_size}) and beta.shape[1] == {num_v_heads}
    A = torch.zeros((len(k), {num_v_heads}, {chunk_size}), dtype=torch.float32, device=k.device)

    def tf32(x):  # float32 as tensor cores read it: its upper 19 bits
        return (x.view(torch.int32) & -8192).view(torch.float32) if x.dtype == torch.float32 else x

{each_chunk}        key = k[start:end].repeat_interleave({num_v_heads} // {num_k_heads}, dim=1)
        scaled = tf32(key * beta[start:end, :, None]).to(torch.float32)
        products = torch.einsum("ihk,jhk->hij", scaled, tf32(key).to(torch.float32)){decay}
        A[start:end, :, : end - start] = products.tril(-1).transpose(0, 1)
    return A.to(torch.{dtype})
"""
DECAY = """
        sums = gate[start:end].to(torch.float32).mT
        products = products * torch.exp(sums[:, :, None] - sums[:, None, :])"""

INVERSE = """    assert A.shape[1:] == ({num_v_heads}, {chunk_size})
    inverse = torch.zeros(A.shape, dtype=torch.float32, device=A.device)
{each_chunk}        one = torch.eye(end - start, device=A.device).expand({num_v_heads}, -1, -1)
        lower = A[start:end, :, : end - start].to(torch.float32).transpose(0, 1).tril(-1)
        solution = torch.linalg.solve_triangular(one + lower, one, upper=False, unitriangular=True)
        inverse[start:end, :, : end - start] = solution.transpose(0, 1)
    return inverse.to(torch.{dtype})
"""

KKT_INVERSE = """    assert k.shape[1:] == ({num_k_heads}, {head_size}) and beta.shape[1] == {num_v_heads}
    inverse = torch.zeros((len(k), {num_v_heads}, {chunk_size}), dtype=torch.float32, device=k.device)
{each_chunk}        key = k[start:end].repeat_interleave({num_v_heads} // {num_k_heads}, dim=1).to(torch.float32)
        products = torch.einsum("ihk,jhk->hij", key, key){decay}
        lower = (products * beta[start:end].to(torch.float32).mT[:, :, None]).tril(-1)
        one = torch.eye(end - start, device=k.device).expand({num_v_heads}, -1, -1)
        solution = torch.linalg.solve_triangular(one + lower, one, upper=False, unitriangular=True)
        inverse[start:end, :, : end - start] = solution.transpose(0, 1)
    return inverse.to(torch.{dtype})
"""

WY = """    assert k.shape[1:] == ({num_k_heads}, {head_size}) and v.shape[1:] == ({num_v_heads}, {v_head_size})
    w = torch.zeros((len(k), {num_v_heads}, {head_size}), dtype=torch.float32, device=k.device)
    u = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
{each_chunk}        matrix = A[start:end, :, : end - start].to(torch.float32)
        rate, decay = beta[start:end, :, None], torch.exp(gate[start:end, :, None].to(torch.float32))
        key = k[start:end].repeat_interleave({num_v_heads} // {num_k_heads}, dim=1)
        key, value = (key * rate * decay).to(k.dtype), (v[start:end] * rate).to(v.dtype)
        w[start:end] = torch.einsum("ihj,jhk->ihk", matrix, key.to(torch.float32))
        u[start:end] = torch.einsum("ihj,jhv->ihv", matrix, value.to(torch.float32))
    return w.to(k.dtype), u.to(v.dtype)
"""

KEYS, VALUES = ("total_tokens", "num_k_heads", "head_size"), ("total_tokens", "num_v_heads", "v_head_size")
PER_HEAD, SQUARE = VALUES[:2], (*VALUES[:2], "chunk_size")
LETTERS = {"num_k_heads": "qk", "num_v_heads": "v", "head_size": "k", "v_head_size": "d", "chunk_size": "c"}
SUMS = "The logarithm of the decay from the beginning of the chunk to each token."
RATE = "The rate at which the state takes values on."


def joined(call: Invocation, name: str, *axes: str, description: str | None = None) -> TensorArg:
    """An argument [1, tokens, …] as [tokens, …]."""
    tensor = call.tensor(name)
    if tensor.shape[0] != 1:
        raise Unrecognized("its sequences are not joined")
    return tensor_arg(tensor[0], *axes, description=description)


def sequences_of(call: Invocation, chunks: torch.Tensor | None = None) -> dict[str, TensorArg]:
    """Where each sequence begins, and which of its chunks each is: `chunks`, or the argument `chunk_indices`."""
    indices = call.tensor("chunk_indices") if chunks is None else chunks
    text = "Of each chunk its sequence, and its number within that."
    return {
        "cu_seqlens": tensor_arg(call.tensor("cu_seqlens"), "len_indptr", description="Where each sequence begins."),
        "chunk_indices": tensor_arg(indices, "num_chunks", "pair", description=text),
    }


def gate_of(call: Invocation) -> dict[str, TensorArg]:
    """The sums of `g`, if there are any."""
    return {} if call["g"] is None else {"gate": joined(call, "g", *PER_HEAD, description=SUMS)}


def delta_kernel(
    call: Invocation,
    op_type: str,
    words: str,
    inputs: dict[str, TensorArg],
    outputs: dict[str, TensorArg],
    reference: str,
    texts: dict[str, str | float],
    description: str,
    work: Work,
    constraints: tuple[str, ...] = (),
) -> KernelInstance:
    """`words`: what the name says beside the sizes."""
    tensors = [(arg.shape or (), arg.value) for arg in inputs.values() if isinstance(arg.value, torch.Tensor)]
    sizes = {"chunk_size": int(call.number("BT"))}
    sizes |= {axis: size for shape, tensor in tensors for axis, size in zip(shape, tensor.shape, strict=True)}
    constants = {axis: sizes[axis] for axis in LETTERS if axis in sizes}
    name = op_type + words + "".join(f"_{LETTERS[axis]}{size}" for axis, size in constants.items())
    constants["pair"] = 2
    return chunk_kernel(name, op_type, constants, inputs, outputs, reference, texts, description, work, constraints)


def dtype_word(tensor: torch.Tensor, name: str) -> str:
    """What a Definition's name says of the dtype of what is usually float32."""
    return abbreviate(tensor.dtype, torch.float32).replace("_", f"_{name}")


@family("gdn_chunk_cumsum", "triton::chunk_local_cumsum_scalar_kernel")
def chunk_cumsum(call: Invocation) -> KernelInstance:
    """`s`, `o`: [1, tokens, heads]."""
    call.refuse("REVERSE", "HEAD_FIRST", "HAS_SCALE")
    g, summed = call.tensor("s"), joined(call, "o", *PER_HEAD, description=SUMS)
    inputs = {"g": joined(call, "s", *PER_HEAD, description="The logarithm of each decay."), **sequences_of(call)}
    words = abbreviate(g.dtype, torch.float32) + dtype_word(summed.value, "out")
    return delta_kernel(
        call,
        "gdn_chunk_cumsum",
        words,
        inputs,
        {"gate": summed},
        CUMSUM,
        {"dtype": summed.dtype},
        "The logarithms of decays, summed within each chunk.",
        cumsum_work,
    )


@counts_work("gdn_chunk_cumsum")
def cumsum_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    return read_bytes(inputs), int(inputs["g"].numel())


@family("gdn_chunk_kkt", "triton::chunk_scaled_dot_kkt_fwd_kernel")
def chunk_kkt(call: Invocation) -> KernelInstance:
    """`k`: [1, tokens, key heads, size], `beta`, `g`: [1, tokens, heads], `A`: [1, tokens, heads, chunk size]."""
    call.refuse("CAST_DOT_TO_K_DTYPE")
    inputs = {
        "k": joined(call, "k", *KEYS),
        "beta": joined(call, "beta", *PER_HEAD, description=RATE),
        **gate_of(call),
        **sequences_of(call),
    }
    key, beta, out = (call.tensor(name) for name in ("k", "beta", "A"))
    words = ("" if "gate" in inputs else "_nogate") + abbreviate(key.dtype, torch.bfloat16)
    words += dtype_word(beta, "rate") + dtype_word(out, "out")
    return delta_kernel(
        call,
        "gdn_chunk_kkt",
        words,
        inputs,
        {"A": joined(call, "A", *SQUARE)},
        KKT,
        {"decay": DECAY if "gate" in inputs else "", "dtype": dtype_name(out.dtype)},
        "Products of the keys of each chunk below the diagonal, scaled by rate and decay. Float32 is cut to TF32.",
        kkt_work,
    )


@counts_work("gdn_chunk_kkt")
def kkt_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    """Heads of values that share a key share its products."""
    chunks = chunks_of(inputs, size)
    return read_bytes(inputs), 2 * (chunks.pairs - chunks.tokens) * int(inputs["k"][:1].numel())


def lower_triangle(inputs: dict[str, TensorArg], out: torch.Tensor) -> TensorArg:
    """`out`, [1, tokens, heads, chunk size], with zeros where a token is followed by those after it in its chunk."""
    values, size = {name: arg.value for name, arg in inputs.items()}, out.shape[3]

    def inverse() -> torch.Tensor:
        positions = chunks_of(values, size).positions(out.shape[1])
        lower = (torch.arange(size) <= positions[:, None]).to(out.device)
        return torch.where(lower[:, None], out[0], 0.0)

    return lazy_arg(out.dtype, SQUARE, inverse)


@family(
    "gdn_chunk_inverse",
    "triton::solve_tril_16x16_kernel",
    "triton::merge_16x16_to_32x32_inverse_kernel",
    "triton::merge_16x16_to_64x64_inverse_kernel",
)
def chunk_inverse(call: Invocation) -> KernelInstance:
    """`A`, `Ai`: [1, tokens, heads, chunk size]; of `Ai` what lies above the diagonal was zero before."""
    matrix, out = call.tensor("A"), call.tensor("Ai")
    inputs = {"A": joined(call, "A", *SQUARE), **sequences_of(call)}
    words = abbreviate(matrix.dtype, torch.float32) + abbreviate(out.dtype, torch.bfloat16).replace("_", "_out")
    return delta_kernel(
        call,
        "gdn_chunk_inverse",
        words,
        inputs,
        {"inverse": lower_triangle(inputs, out)},
        INVERSE,
        {"dtype": dtype_name(out.dtype)},
        "The inverse of one and a matrix below the diagonal, for each chunk and head.",
        inverse_work,
    )


@counts_work("gdn_chunk_inverse")
def inverse_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    """The part below the diagonal is read; n³ / 3 FLOPs invert a triangle."""
    chunks, matrix = chunks_of(inputs, size), inputs["A"]
    below = (chunks.pairs - chunks.tokens) * int(matrix.shape[1])
    flops = int((chunks.lengths**3).sum()) * int(matrix.shape[1]) // 3
    return read_bytes(inputs, "A") + below * matrix.element_size(), flops


@family("gdn_chunk_kkt_inverse", "triton::chunk_gated_delta_rule_fwd_kkt_solve_kernel")
def chunk_kkt_inverse(call: Invocation) -> KernelInstance:
    """`k`: [1, tokens, key heads, size], `beta`, `g`: [1, tokens, heads], `A`: [1, tokens, heads, chunk size]."""
    inputs = {
        "k": joined(call, "k", *KEYS),
        "beta": joined(call, "beta", *PER_HEAD, description=RATE),
        **gate_of(call),
        **sequences_of(call),
    }
    key, beta, out = (call.tensor(name) for name in ("k", "beta", "A"))
    words = ("" if "gate" in inputs else "_nogate") + abbreviate(key.dtype, torch.bfloat16)
    words += dtype_word(beta, "rate") + abbreviate(out.dtype, key.dtype).replace("_", "_out")
    return delta_kernel(
        call,
        "gdn_chunk_kkt_inverse",
        words,
        inputs,
        {"inverse": lower_triangle(inputs, out)},
        KKT_INVERSE,
        {"decay": DECAY if "gate" in inputs else "", "dtype": dtype_name(out.dtype)},
        "The inverse of one and the products of a chunk's keys below the diagonal, scaled by rate and decay.",
        kkt_inverse_work,
    )


@counts_work("gdn_chunk_kkt_inverse")
def kkt_inverse_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    solved = int((chunks_of(inputs, size).lengths ** 3).sum()) * int(inputs["beta"].shape[1]) // 3
    read, flops = kkt_work(inputs, size)
    return read, flops + solved


@replay_rule("triton::chunk_scaled_dot_kkt_fwd_kernel", "triton::chunk_gated_delta_rule_fwd_kkt_solve_kernel")
class ProductsOfKeys(ReplayRule):
    """Keys of length one and rates below one, as in models: else what TF32 rounds shows, and an inverse grows along
    each chunk."""

    def prepare(self, bound: BoundCall) -> None:
        bound.set_content("k", torch.nn.functional.normalize(torch.randn(bound.spec("k").shape), dim=-1))
        bound.set_content("beta", torch.rand(bound.spec("beta").shape))
        set_falling_gate(bound, bound.content("chunk_indices"))


@replay_rule(
    "triton::solve_tril_16x16_kernel",
    "triton::merge_16x16_to_32x32_inverse_kernel",
    "triton::merge_16x16_to_64x64_inverse_kernel",
)
class ChunkInverse(ReplayRule):
    """What lies on and above the diagonal is zero, as the kernel before leaves it, and the inverse stays small."""

    def prepare(self, bound: BoundCall) -> None:
        shape, bounds, indices = bound.spec("A").shape, bound.content("cu_seqlens"), bound.content("chunk_indices")
        if bounds is not None and indices is not None:
            positions = Chunks.of_sequences(bounds, indices, shape[3]).positions(shape[1])
            below = torch.arange(shape[3]) < positions[:, None]
            bound.set_content("A", torch.where(below[:, None], torch.randn(shape) / 8, 0.0))


def falling_sums(chunks: Chunks, rates: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Of `rates`, [heads], and `steps` from 0 to 1, [tokens, heads], sums that fall along each chunk."""
    return -rates * (chunks.positions(len(steps))[:, None] + steps)


def set_falling_gate(bound: BoundCall, chunk_indices: torch.Tensor | None) -> None:
    """Sums of logarithms fall: for those that rise SGLang's kernels take no decay, and vLLM's overflow."""
    gate, bounds = bound["g"], bound.content("cu_seqlens")
    if isinstance(gate, TensorSpec) and len(gate.shape) == 3 and bounds is not None and chunk_indices is not None:
        (_, tokens, heads), chunks = gate.shape, Chunks.of_sequences(bounds, chunk_indices, bound.integer("BT"))
        rates, steps = 0.1 * 10 ** (-3 * torch.rand(heads)), torch.rand(tokens, heads)
        bound.set_content("g", falling_sums(chunks, rates, steps)[None])


@replay_rule("triton::recompute_w_u_fwd_kernel", "triton::chunk_fwd_kernel_o")
class DecayingChunks(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_falling_gate(bound, bound.content("chunk_indices"))


@family("gdn_chunk_wy", "triton::recompute_w_u_fwd_kernel")
def chunk_wy(call: Invocation) -> KernelInstance:
    """`k`: [1, tokens, key heads, size]; `w`, `v`, `u`: [1, tokens, heads, size]; `A`: the inverse."""
    inputs = {
        "k": joined(call, "k", *KEYS),
        "v": joined(call, "v", *VALUES),
        "beta": joined(call, "beta", *PER_HEAD, description=RATE),
        "A": joined(call, "A", *SQUARE, description="Lower triangular, with ones on the diagonal."),
        **gate_of(call),
        **sequences_of(call),
    }
    if "gate" not in inputs:
        raise Unrecognized("its keys do not decay")
    words = abbreviate(call.tensor("k").dtype, torch.bfloat16) + dtype_word(call.tensor("beta"), "rate")
    return delta_kernel(
        call,
        "gdn_chunk_wy",
        words,
        inputs,
        {"w": joined(call, "w", "total_tokens", "num_v_heads", "head_size"), "u": joined(call, "u", *VALUES)},
        WY,
        {},
        "The keys (w) and values (u) by which each chunk changes the state.",
        wy_work,
    )


@counts_work("gdn_chunk_wy")
def wy_work(inputs: Mapping[str, Any], size: int) -> tuple[int, int]:
    pairs, matrix = chunks_of(inputs, size).pairs * int(inputs["A"].shape[1]), inputs["A"]
    columns = int(inputs["k"].shape[2] + inputs["v"].shape[2])
    return read_bytes(inputs, "A") + pairs * matrix.element_size(), 2 * pairs * columns


@valid_input("g", "gate", op_types=DELTA_TYPES)
def log_decays(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """Negative; `gate` falls along each chunk."""
    if len(draft.axis_names(name)) != 2:
        return None
    tokens, heads = draft.shape(name)
    rates, steps = 0.1 * forgetting_rates(draft, heads), draft.reals(0.0, 1.0, (tokens, heads))
    if name == "g":
        return -rates * steps
    chunks = chunks_of({key: draft[key] for key in ("cu_seqlens", "chunk_indices")}, draft.size("chunk_size") or 1)
    return falling_sums(chunks, rates, steps)


@valid_input("A", op_types=("gdn_chunk_inverse",))
def below_diagonal(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Small, so that the inverse is small, too."""
    shape = draft.shape(name)
    chunks = chunks_of({key: draft[key] for key in ("cu_seqlens", "chunk_indices")}, shape[2])
    below = torch.arange(shape[2]) < chunks.positions(shape[0])[:, None]
    return torch.where(below[:, None], draft.reals(-0.2, 0.2, shape), 0.0)

"""Chunks of joined sequences: by them the kernels of a recurrent layer's prefill divide its tokens.

A chunk has at most `chunk_size` tokens, all of one sequence. Mamba-2's kernels are told where each chunk begins,
those of the gated delta rule which sequence and which part of it each chunk is. Tokens outside of all chunks are
padding: no kernel writes their outputs, which are zero here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kcap.schemas.derive.cost import Cost, CostInputs, distinct_bytes
from kcap.schemas.derive.families import cost_function, valid_input
from kcap.schemas.derive.families.attention.pages import starts_of
from kcap.schemas.derive.invocation import require_values, torch_dtype, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, TensorArg
from kcap.schemas.derive.workload_draft import WorkloadDraft

SCAN_TYPES = ("mamba2_chunk_cumsum", "mamba2_chunk_state", "mamba2_chunk_bmm", "mamba2_chunk_scan")
DELTA_TYPES = (
    "gdn_chunk_cumsum",
    "gdn_chunk_kkt",
    "gdn_chunk_inverse",
    "gdn_chunk_kkt_inverse",
    "gdn_chunk_wy",
    "gdn_chunk_state",
    "gdn_chunk_output",
)

HEAD = """import torch


@torch.no_grad()
def run({inputs}):
"""
BY_BOUNDS = """    for chunk, (start, end) in enumerate(zip(chunk_starts.tolist(), chunk_ends.tolist())):
"""
BY_SEQUENCE = """    bounds = cu_seqlens.tolist()
    for chunk, (sequence, number) in enumerate(chunk_indices.tolist()):
        start = bounds[sequence] + number * {chunk_size}
        end = min(start + {chunk_size}, bounds[sequence + 1])
"""


def numbered(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `counts[i]` members of each i, in order, their i and their number within it: int64 [sum of counts]."""
    owner = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return owner, torch.arange(len(owner), device=counts.device) - (counts.cumsum(0) - counts)[owner]


@dataclass(frozen=True)
class Chunks:
    """`starts`, `ends`: the first token of each chunk and the one after its last, int64 [num_chunks]."""

    starts: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of_bounds(cls, starts: torch.Tensor, ends: torch.Tensor) -> Chunks:
        return cls(*(require_values(bound, "bounds of its chunks").cpu().long() for bound in (starts, ends)))

    @classmethod
    def of_sequences(cls, cu_seqlens: torch.Tensor, chunk_indices: torch.Tensor, size: int) -> Chunks:
        """`chunk_indices`: sequence and number of each chunk within it, [num_chunks, 2]."""
        bounds = require_values(cu_seqlens, "sequence starts").cpu().long()
        sequences, numbers = require_values(chunk_indices, "chunks of its sequences").cpu().long().unbind(1)
        starts = bounds[sequences] + numbers * size
        return cls(starts, torch.minimum(starts + size, bounds[sequences + 1]))

    @property
    def lengths(self) -> torch.Tensor:
        return (self.ends - self.starts).clamp(min=0)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def pairs(self) -> int:
        """Pairs of a token and itself or one before it in its chunk."""
        return int((self.lengths * (self.lengths + 1) // 2).sum())

    def positions(self, count: int) -> torch.Tensor:
        """The place of each of `count` tokens in its chunk, from 0; -1 for padding."""
        owner, places = numbered(self.lengths)
        positions = torch.full((count,), -1)
        positions[self.starts[owner] + places] = places
        return positions

    def without_padding(self, output: torch.Tensor) -> torch.Tensor:
        """`output`, [tokens, …], with zeros for padding."""
        inside = (self.positions(len(output)) >= 0).to(output.device)
        return torch.where(inside.reshape(-1, *[1] * (output.dim() - 1)), output, 0.0)


def chunks_of(inputs: Mapping[str, Any], size: int) -> Chunks:
    """The chunks that inputs of either kind tell, of at most `size` tokens."""
    if "chunk_starts" in inputs:
        return Chunks.of_bounds(inputs["chunk_starts"], inputs["chunk_ends"])
    return Chunks.of_sequences(inputs["cu_seqlens"], inputs["chunk_indices"], size)


# From inputs by name and the chunk size to the bytes that must be read of them, and the FLOPs
Work = Callable[[Mapping[str, Any], int], tuple[int, int]]


def counts_work(op_type: str) -> Callable[[Work], Work]:
    """Register the cost of a Definition of this op_type."""

    def register(work: Work) -> Work:
        @cost_function(op_type)
        def cost(inputs: CostInputs) -> Cost:
            whole = inputs.cost(*work(inputs.inputs, inputs.sizes["chunk_size"]))
            return replace(whole, bytes=whole.bytes - unwritten_bytes(inputs.inputs))

        return work

    return register


def read_bytes(inputs: Mapping[str, Any], *without: str) -> int:
    """Bytes of all tensors but those called `without`."""
    tensors = (value for name, value in inputs.items() if name not in without)
    return sum(distinct_bytes(value) for value in tensors if isinstance(value, torch.Tensor))


def place_bytes(inputs: Mapping[str, Any], tokens: int) -> int:
    """Bytes of the places that tokens fill in time steps and decays, float32 [heads, chunks, chunk size]."""
    return 2 * 4 * tokens * int(inputs["dt"].shape[0])


def unwritten_bytes(inputs: Mapping[str, Any]) -> int:
    """Of a pool of states, which is an output, too: those that no sequence has."""
    pool = inputs.get("state")
    return 0 if pool is None else total_bytes(pool) - sequences_with_states(inputs) * total_bytes(pool[:1])


def sequences_with_states(inputs: Mapping[str, Any]) -> int:
    """How many sequences have a state in the pool; the others are padding."""
    numbers = inputs["state_indices"]
    states = require_values(numbers() if callable(numbers) else numbers, "states of its sequences")
    return int((states >= 0).sum())


def chunk_kernel(
    name: str,
    op_type: str,
    constants: dict[str, int],
    inputs: dict[str, TensorArg],
    outputs: dict[str, TensorArg],
    reference: str,
    texts: dict[str, str | float],
    description: str,
    work: Work,
    constraints: tuple[str, ...] = (),
) -> KernelInstance:
    """`constants`: the axes that do not vary, the chunk size among them. Outputs of tokens are zero for padding.

    `reference`: the body of `run`, with places for `constants`, for `texts` and for the head of a loop over chunks.
    """
    values, size = {name: arg.value for name, arg in inputs.items()}, constants["chunk_size"]
    axes = dict.fromkeys(axis for arg in inputs.values() for axis in arg.shape or ())
    each_chunk = BY_BOUNDS if "chunk_starts" in inputs else BY_SEQUENCE.format(**constants)

    def unpadded(output: TensorArg) -> TensorArg:
        if output.shape is None or output.shape[0] != "total_tokens":
            return output
        return replace(output, value=lambda: chunks_of(values, size).without_padding(output.get()))

    kernel = KernelInstance(
        name=name,
        op_type=op_type,
        axes={**axes, **constants},
        inputs=inputs,
        outputs={name: unpadded(output) for name, output in outputs.items()},
        reference=HEAD.format(inputs=", ".join(inputs)) + reference.format(each_chunk=each_chunk, **constants, **texts),
        description=description,
        constraints=constraints,
        flops=lambda: work(values, size)[1],
    )
    sizes = kernel.sizes()
    written = sum(
        math.prod(sizes[axis] for axis in output.shape or ()) * torch_dtype(output.dtype).itemsize
        for output in outputs.values()
    )
    return replace(kernel, touched=lambda: work(values, size)[0] + written - unwritten_bytes(values))


def forgetting_rates(draft: WorkloadDraft, *shape: int) -> torch.Tensor:
    """Up to 1 a token. Some states last a thousand tokens: whoever leaves out what is long ago is wrong in these."""
    return 10 ** draft.reals(-3.0, 0.0, shape)


@valid_input("chunk_starts", op_types=SCAN_TYPES)
def chunk_starts(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Of chunks one after another, none longer than a chunk may be."""
    lengths = some_of_each(draft, draft.size("total_tokens") or 0, draft.shape(name)[0], draft.size("chunk_size"))
    return lengths.cumsum(0) - lengths


@valid_input("chunk_ends", op_types=SCAN_TYPES)
def chunk_ends(draft: WorkloadDraft, name: str) -> torch.Tensor:
    starts, tokens = draft["chunk_starts"], draft.size("total_tokens") or 0
    last = starts[-1:] + (draft.size("chunk_size") or tokens)
    return torch.cat([starts[1:], last.clamp(max=tokens)])


@valid_input("seq_idx", op_types=SCAN_TYPES)
def sequence_of_chunk(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Ascending, and each sequence has chunks."""
    count = draft.shape(name)[0]
    chunks = some_of_each(draft, count, min(draft.size("num_seqs") or 1, count))
    return torch.arange(len(chunks)).repeat_interleave(chunks)


@valid_input("last_chunk_indices", op_types=("mamba2_state_passing",))
def last_chunks(draft: WorkloadDraft, name: str) -> torch.Tensor:
    return some_of_each(draft, draft.axes["num_chunks"], draft.shape(name)[0]).cumsum(0) - 1


@valid_input("cu_seqlens", op_types=DELTA_TYPES)
def sequence_starts(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Sequences with as many chunks in all as there are, and as many tokens as these hold at most."""
    size = draft.size("chunk_size") or 1
    chunks = some_of_each(draft, draft.axes["num_chunks"], draft.shape(name)[0] - 1)
    least = ((chunks - 1) * size + 1).clamp(min=0)
    lengths = draft.parts(draft.size("total_tokens") or 0, least, chunks * size)
    return starts_of(lengths)


def some_of_each(draft: WorkloadDraft, total: int, count: int, most: int | None = None) -> torch.Tensor:
    """`total` in `count` random parts of at most `most`: each has one or more where that can be, else one or none."""
    enough = count <= total
    high = max(total if most is None else most, 1) if enough else 1
    return draft.parts(total, torch.full((count,), int(enough)), torch.full((count,), high))


@valid_input("chunk_indices", op_types=DELTA_TYPES)
def chunk_indices(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """The chunks of the first sequence, then those of the second, and so on; as `cu_seqlens` has them."""
    count, size = draft.shape(name)[0], draft.size("chunk_size") or 1
    chunks = (draft["cu_seqlens"].cpu().long().diff() + size - 1) // size
    pairs = torch.stack(numbered(chunks), dim=1)
    indices = torch.zeros(count, 2, dtype=torch.int64)
    indices[: len(pairs)] = pairs[:count]
    return indices

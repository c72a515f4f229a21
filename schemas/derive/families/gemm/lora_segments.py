"""sgmv_shrink and sgmv_expand: the two products of low-rank adapters (LoRA) by SGLang's Triton kernels.

Segmented gather matrix-vector products, after Punica (arXiv:2310.18547): tokens lie in segments, each of one adapter,
in an order that `permutation` names, or in their own. All adapters have room for the same rank; an adapter of a
smaller one fills the first rows of a shrink's matrices, slice after slice, and a token's row likewise. What an adapter
of rank 0 has (none: the model's own requests) stays as it was. The kernels of `--lora-backend csgmv`, SGLang's usual,
cut segments to chunks; those of `triton` walk them.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.families.attention.pages import starts_of
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized, require_values
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.flashinfer.descriptions import BEFORE
from kcap.schemas.recording.values import TensorSpec

SEGMENTS = """    starts, ranks = seg_indptr.tolist(), lora_ranks.tolist()
    for segment, lora in enumerate(weight_indices.tolist()):
        rank = min(ranks[lora], {r})
        rows = {rows}
"""
PERMUTED = "permutation[starts[segment] : starts[segment + 1]].long()"
IN_ORDER = "torch.arange(starts[segment], max(starts[segment], min(starts[segment + 1], len({rows}))))"

SHRINK = """import torch


@torch.no_grad()
def run({inputs}):
    assert lora_a.shape[1:] == ({s}, {r}, {k}) and shrunk.shape[1:] == ({s}, {r})
    shrunk_out = shrunk.flatten(1).clone(memory_format=torch.contiguous_format)
{segments}        product = x[rows].to(torch.float32) @ lora_a[lora].flatten(0, 1)[: {s} * rank].to(torch.float32).T
        shrunk_out[rows, : {s} * rank] = product.to(shrunk.dtype)
    return shrunk_out.unflatten(1, ({s}, {r}))
"""

EXPAND = """import torch


@torch.no_grad()
def run({inputs}):
    assert lora_b.shape[1:] == ({n}, {r}) and shrunk.shape[1:] == ({s}, {r})
    output_out = output.clone(memory_format=torch.contiguous_format)
{segments}        for part, (start, end) in enumerate({slices}):
            if rank > 0:
                a = shrunk[rows].flatten(1)[:, part * rank : (part + 1) * rank].to(torch.float32)
                product = a @ lora_b[lora, start:end, :rank].to(torch.float32).T * scalings[lora]
                output_out[rows, start:end] += product.to(output.dtype)
    return output_out
"""

INDICES = {
    "seg_indptr": ("len_indptr", "Where each segment of tokens begins; the rest of a graph's are empty."),
    "weight_indices": ("num_segments", "The adapter of each segment."),
    "lora_ranks": ("num_loras", "The rank of each adapter; 0: its tokens stay as they were."),
    "permutation": ("len_permutation", "Rows of tokens, those of one segment together."),
}
LOW = ("num_tokens", "num_slices", "rank")
AXES = dict.fromkeys(("num_tokens", "num_loras", "num_segments", "len_indptr"))
CONSTRAINTS = ("len_indptr == num_segments + 1",)
SHRINKS = ("triton::_chunked_lora_shrink_kernel", "triton::_sgemm_lora_a_kernel")
EXPANDS = (
    "triton::_chunked_lora_expand_kernel",
    "triton::_sgemm_lora_b_kernel",
    "triton::_qkv_lora_b_kernel",
    "triton::_gate_up_lora_b_kernel",
)
OP_TYPES = ("sgmv_shrink", "sgmv_expand")


def index_inputs(call: Invocation) -> dict[str, TensorArg]:
    """Of the segments; the kernels that walk them have their lengths, too, which `seg_indptr` sums up."""
    tensors = {name: call.tensor(name) for name in ("seg_indptr", "weight_indices", "lora_ranks")}
    chunked = "chunked" in call.base
    if chunked and call["num_segs"] != len(tensors["weight_indices"]):
        raise Unrecognized("not all of its segments are in use, or how many is not known")
    if chunked or call["SORTED_BY_ADAPTER"] is True:
        tensors["permutation"] = call.tensor("permutation", "sorted_token_ids")
    elif call["SORTED_BY_ADAPTER"] is not False:
        raise Unrecognized("its constants are not known")
    return {
        name: tensor_arg(tensor, INDICES[name][0], description=INDICES[name][1]) for name, tensor in tensors.items()
    }


def segments_text(inputs: dict[str, TensorArg], rank: int) -> str:
    rows = PERMUTED if "permutation" in inputs else IN_ORDER.format(rows=next(iter(inputs)))
    return SEGMENTS.format(r=rank, rows=rows)


def axes_of(inputs: dict[str, TensorArg], **fixed: int) -> dict[str, int | None]:
    return AXES | ({"len_permutation": None} if "permutation" in inputs else {}) | fixed


def matrices(call: Invocation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if call["ENABLE_PDL"] is not None:
        raise Unrecognized("of an experimental set of these names, which scales and pads otherwise")
    x, weights, out = (call.tensor(name) for name in ("x", "weights", "output"))
    if x.dim() != 2 or weights.dim() != 3 or out.dim() != 2 or x.dtype not in FLOATS:
        raise Unrecognized("no rows of tokens, and matrices of adapters")
    if not x.dtype == weights.dtype == out.dtype:
        raise Unrecognized("its tensors have several dtypes")
    return x, weights, out


@family("sgmv_shrink", *SHRINKS)
def shrink(call: Invocation) -> KernelInstance:
    """`x`: [tokens, hidden], `weights`: [adapters, slices * rank, hidden], `output`: [tokens, slices * rank]."""
    x, weights, out = matrices(call)
    (_, width, k), s = weights.shape, int(call.number("NUM_SLICES", "stack_num"))
    if width % s or out.shape[1] != width:
        raise Unrecognized("its rows are no slices of one rank")
    r = width // s
    inputs = {
        "x": tensor_arg(x, "num_tokens", "hidden_size"),
        "lora_a": tensor_arg(weights.unflatten(1, (s, r)), "num_loras", *LOW[1:], "hidden_size"),
        "shrunk": tensor_arg(out.unflatten(1, (s, r)), *LOW, description=BEFORE),
        **index_inputs(call),
    }
    sorted_ = "" if "permutation" in inputs else "_inorder"
    return KernelInstance(
        name=f"sgmv_shrink{sorted_}{abbreviate(x.dtype, torch.bfloat16)}_s{s}_r{r}_k{k}",
        op_type="sgmv_shrink",
        axes=axes_of(inputs, num_slices=s, rank=r, hidden_size=k),
        inputs=inputs,
        outputs={"shrunk_out": lazy_arg(out.dtype, LOW, lambda: call.tensor("output").unflatten(1, (s, r)))},
        reference=SHRINK.format(inputs=", ".join(inputs), segments=segments_text(inputs, r), s=s, r=r, k=k),
        description="Each token's row times the first matrices of its low-rank adapter.",
        constraints=CONSTRAINTS,
        flops=lambda: shrink_cost(work_of(call), x, s).flops,
        touched=lambda: shrink_cost(work_of(call), x, s).bytes,
    )


@family("sgmv_expand", *EXPANDS)
def expand(call: Invocation) -> KernelInstance:
    """`x`: [tokens, slices * rank], `weights`: [adapters, columns of all slices, rank], `output`: [tokens, columns],
    perhaps of a wider layer."""
    x, weights, out = matrices(call)
    (_, total, r), offsets, scalings = weights.shape, slice_offsets(call), call.tensor("scalings")
    s, width = len(offsets) - 1, out.shape[1]
    if x.shape[1] != s * r or sorted(offsets) != offsets or (offsets[0], offsets[-1]) != (0, total) or total > width:
        raise Unrecognized("its slices are not those of its rows")
    inputs = {
        "shrunk": tensor_arg(x.unflatten(1, (s, r)), *LOW),
        "lora_b": tensor_arg(weights, "num_loras", "columns", "rank"),
        "output": tensor_arg(out, "num_tokens", "output_size", description=BEFORE),
        **index_inputs(call),
        "scalings": tensor_arg(scalings, "num_loras", description="Of each adapter's product."),
    }
    words = ("" if "permutation" in inputs else "_inorder") + abbreviate(x.dtype, torch.bfloat16)
    sizes = "_".join(str(end - start) for start, end in pairwise(offsets))
    return KernelInstance(
        name=f"sgmv_expand{words}_s{s}_n{sizes}_r{r}" + (f"_of{width}" if width != total else ""),
        op_type="sgmv_expand",
        axes=axes_of(inputs, num_slices=s, rank=r, columns=total, output_size=width),
        inputs=inputs,
        outputs={"output_out": lazy_arg(out.dtype, ("num_tokens", "output_size"), lambda: call.tensor("output"))},
        reference=EXPAND.format(
            inputs=", ".join(inputs),
            segments=segments_text(inputs, r),
            s=s,
            r=r,
            n=total,
            slices=f"[{', '.join(map(str, pairwise(offsets)))}]",
        ),
        description="Each token's row of a low rank times the second matrices of its adapter, added to its output.",
        constraints=CONSTRAINTS,
        flops=lambda: expand_cost(work_of(call), x, s, total).flops,
        touched=lambda: expand_cost(work_of(call), x, s, total).bytes,
    )


def slice_offsets(call: Invocation) -> list[int]:
    """Where the columns of each slice begin and end: a constant of the kernel, or a tensor (up to SGLang 0.5.15)."""
    if "sgemm" in call.base:
        return [0, int(call.number("N"))]
    if "gate_up" in call.base:
        return [part * int(call.number("output_dim")) for part in range(3)]
    if "chunked" in call.base:
        if call["SLICE_OFFSETS"]:
            return [int(offset) for offset in call["SLICE_OFFSETS"]]
        if call["NUM_SLICES"] == 1:
            return [0, int(call.number("OUTPUT_DIM"))]
    table = require_values(call.tensor("slice_offsets", "n_offs"), "sizes of its slices")
    return [int(offset) for offset in table.tolist()]


Work = tuple[int, int, int]


def work_of(call: Invocation) -> Work:
    tensors = (call.tensor(name) for name in ("seg_indptr", "weight_indices", "lora_ranks"))
    return segment_work(len(call.tensor("x")), *tensors)


def segment_work(tokens: int, seg_indptr: torch.Tensor, weight_indices: torch.Tensor, lora_ranks: torch.Tensor) -> Work:
    """Tokens that have an adapter, the ranks of these tokens' summed up, and the ranks of all adapters in use.

    `tokens`: how many there are; the segments of a graph may go on behind them.
    """
    bounds, loras, ranks = (
        require_values(tensor, what).cpu().long()
        for tensor, what in ((seg_indptr, "segments"), (weight_indices, "adapters"), (lora_ranks, "adapters' ranks"))
    )
    lengths, rank = bounds.clamp(max=tokens).diff(), ranks[loras]
    used = loras[(lengths > 0) & (rank > 0)].unique()
    return int(lengths[rank > 0].sum()), int((lengths * rank).sum()), int(ranks[used].sum())


def shrink_cost(work: Work, x: torch.Tensor, slices: int) -> Cost:
    """Of `x`, [tokens, hidden]: tokens with an adapter read and write their rows, each adapter in use is read once."""
    (tokens, token_ranks, ranks), size, hidden = work, x.element_size(), x.shape[1]
    read = (tokens + slices * ranks) * hidden * size
    return Cost(read + slices * token_ranks * size, read, 2 * hidden * slices * token_ranks)


def expand_cost(work: Work, x: torch.Tensor, slices: int, columns: int) -> Cost:
    (tokens, token_ranks, ranks), size = work, x.element_size()
    read = (slices * token_ranks + (ranks + tokens) * columns) * size
    return Cost(read + tokens * columns * size, read, 2 * columns * token_ranks)


@cost_function(*OP_TYPES)
def segments_cost(inputs: CostInputs) -> Cost:
    tensors = (inputs.index(name) for name in ("seg_indptr", "weight_indices", "lora_ranks"))
    work = segment_work(len(inputs["x" if "x" in inputs else "shrunk"]), *tensors)
    slices = inputs.sizes["num_slices"]
    if "lora_a" in inputs:
        cost = shrink_cost(work, inputs["x"], slices)
    else:
        cost = expand_cost(work, inputs["shrunk"], slices, inputs.sizes["columns"])
    return Cost(cost.bytes, cost.read, cost.flops, inputs.dtype)


SMALLEST_CHUNK = 16  # of SGLang's: no segment of its kernels is longer than a chunk


@valid_input("seg_indptr", op_types=OP_TYPES)
def seg_indptr(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """All tokens, in segments that a chunk of the smallest size, or of a power of two, holds."""
    count, tokens = draft.shape("weight_indices")[0], draft.size("num_tokens") or 0
    longest = SMALLEST_CHUNK
    while longest * count < tokens:
        longest *= 2
    low = torch.full((count,), int(count <= tokens))
    return starts_of(draft.parts(tokens, low, torch.full((count,), longest)))


@valid_input("weight_indices", op_types=OP_TYPES)
def weight_indices(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """In order, as SGLang sorts them."""
    return draft.integers(0, draft.size("num_loras") or 1, draft.shape(name)).sort().values


@valid_input("lora_ranks", op_types=OP_TYPES)
def lora_ranks(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """All that there is room for."""
    return torch.full(draft.shape(name), draft.size("rank") or 1)


@valid_input("permutation", op_types=OP_TYPES)
def permutation(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Each token once; a graph's may be longer, and the rest of it is not read."""
    return draft.distinct(draft.shape(name)[0], draft.size("num_tokens") or 1)


class SegmentsRule(ReplayRule):
    """What no Sample holds: chunks one behind the other, adapters in turn, of the full rank."""

    added_to = ("output",)

    def prepare(self, bound: BoundCall) -> None:
        tokens, count = bound.spec("x").shape[0], bound.spec("weight_indices").shape[0]
        loras = bound.spec("weights").shape[0]
        longest = bound["BLOCK_M"] if isinstance(bound["BLOCK_M"], int) else tokens
        step = min(-(-tokens // max(count, 1)), longest)
        set_missing(bound, "seg_indptr", (torch.arange(count + 1) * step).clamp(max=tokens))
        set_missing(bound, "weight_indices", torch.arange(count) % loras)
        set_missing(bound, "lora_ranks", torch.full((loras,), self.rank(bound)))
        for name in ("permutation", "sorted_token_ids"):
            if isinstance(spec := bound[name], TensorSpec):
                set_missing(bound, name, torch.arange(spec.numel) % max(tokens, 1))
        bounds = bound.content("seg_indptr")
        if isinstance(bound["seg_lens"], TensorSpec) and bounds is not None:
            set_missing(bound, "seg_lens", bounds.diff())

    def rank(self, bound: BoundCall) -> int:
        """The largest that there is room for."""
        raise NotImplementedError


@replay_rule(*SHRINKS)
class ShrinkRule(SegmentsRule):
    def rank(self, bound: BoundCall) -> int:
        slices = bound.integer("NUM_SLICES" if bound["NUM_SLICES"] is not None else "stack_num")
        return bound.spec("weights").shape[1] // slices


@replay_rule(*EXPANDS)
class ExpandRule(SegmentsRule):
    def rank(self, bound: BoundCall) -> int:
        return bound.spec("weights").shape[2]

    def prepare(self, bound: BoundCall) -> None:
        """One constant has the sizes of slices, or one slice is the whole, or a Sample holds them."""
        super().prepare(bound)
        offsets: list[int] | None = None
        if isinstance(fixed := bound["SLICE_OFFSETS"], list) and fixed:
            offsets = [offset for offset in fixed if isinstance(offset, int)]
        elif bound["NUM_SLICES"] == 1:
            offsets = [0, bound.integer("OUTPUT_DIM")]
        for name in ("slice_offsets", "n_offs"):
            if isinstance(bound[name], TensorSpec):
                if offsets is not None:
                    set_missing(bound, name, torch.tensor(offsets))
                if bound.content(name) is None:
                    raise Skip("its slices have sizes of their own, of which no Sample holds the numbers")


def set_missing(bound: BoundCall, name: str, values: torch.Tensor) -> None:
    if bound.content(name) is None:
        bound.set_content(name, values.to(torch.int32))

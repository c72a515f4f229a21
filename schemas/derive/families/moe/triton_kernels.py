"""Kernels of OpenAI's `triton_kernels` around `matmul_ogs`: routing, and sums of the products' rows.

What sorts tokens by expert between them is in bitmatrix.py and ragged.py; of the older package (`_combined_routing_*`)
the replay rules are here.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.families.gemm.weight_only import set_words
from kcap.schemas.derive.families.moe.align import drawn_experts, sum_instance
from kcap.schemas.derive.index_arguments import set_indices_below, set_zeros
from kcap.schemas.derive.invocation import Invocation, Unrecognized, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.recording.values import TensorSpec

TOPK = """import torch


@torch.no_grad()
def run(routing_logits):
    assert routing_logits.shape[-1] == {e}
    x = routing_logits.to(torch.float32)
    best = x.sort(dim=-1, descending=True, stable=True).indices[:, :{k}].sort(dim=-1).values
    topk_weights = x.gather(-1, best){softmax}
    bits = torch.zeros((len(x), {words}), dtype=torch.int64, device=x.device)
    bits.scatter_add_(1, best // 32, 1 << (best % 32))
    return topk_weights.to(routing_logits.dtype), best.to(torch.int16), bits.to(torch.int32)
"""

SUM = """import torch


@torch.no_grad()
def run({inputs}):
    assert expert_outputs.shape[-1] == {h}
    x = expert_outputs.to(torch.float32).sum(dim=0){rows}
    return x.to(torch.{dtype})
"""
ROWS = """
    used = permuted_rows >= 0
    x = torch.where(used[..., None], x[torch.where(used, permuted_rows, 0).to(torch.int64)], 0.0).sum(dim=1)"""


@family("moe_routing", "triton::_topk_forward")
def topk_forward(call: Invocation) -> KernelInstance:
    """`X`: [seq_len, num_experts]; `Yv`, `Yi`: [seq_len, top_k], by rising expert; `Bits`: 32 experts to a word.

    Newer ones write them to several ranks, of which one is modelled. The newest (SGLang 0.5.23's) has experts by
    falling weight, which no argument says: there the reference differs.
    """
    call.refuse("USE_PROVIDED_INDX", "dst_offs_m")
    x, weights, ids, bits = call.tensor("X"), *(written_by_topk(call, name) for name in ("Yv", "Yi", "Bits"))
    if bits.stride() == (call["stride_rn"], call["stride_rm"]):  # SGLang's: a row for each word
        bits = bits.T[: len(x)]
    e, k, words = x.shape[1], ids.shape[1], bits.shape[1]
    softmax = call["APPLY_SOFTMAX"]
    if not isinstance(softmax, bool) or call["n_rows"] != len(x) or ids.dtype != torch.int16 or 32 * words < e:
        raise Unrecognized("its constants are not known, or it takes some of the rows")
    axes, word = ("seq_len", "top_k"), abbreviate(x.dtype, torch.float32) + ("_softmax_of_best" if softmax else "")
    return KernelInstance(
        name=f"moe_routing{word}_by_expert_topk{k}_e{e}",
        op_type="moe_routing",
        axes={"seq_len": None, "num_experts": e, "top_k": k, "num_words": words},
        inputs={"routing_logits": tensor_arg(x, "seq_len", "num_experts")},
        outputs={
            "topk_weights": lazy_arg(weights.dtype, axes, lambda: weights),
            "topk_ids": lazy_arg("int16", axes, lambda: ids),
            "expert_bits": lazy_arg("int32", ("seq_len", "num_words"), lambda: in_rows(bits)),
        },
        reference=TOPK.format(e=e, k=k, words=words, softmax=".softmax(dim=-1)" if softmax else ""),
        description="The best experts of each token by number, and as a set of bits.",
        flops=5 * x.numel(),
    )


def written_by_topk(call: Invocation, name: str) -> torch.Tensor:
    """The tensor `name`, or the only one among those of ranks (`PeerYvs`, `PeerYis`, `PeerBits`)."""
    match call[f"Peer{name.removesuffix('s')}s"]:
        case (torch.Tensor() as tensor,):
            return tensor
    return call.tensor(name)


def in_rows(bits: torch.Tensor) -> torch.Tensor:
    """The bits, which lie column by column, as int32 row by row."""
    return bits.view(torch.int32).clone(memory_format=torch.contiguous_format)


@family("moe_sum", "triton::_reduce_grouped")
def reduce_grouped(call: Invocation) -> KernelInstance:
    """`X`: [parts of K, 1, num_rows, hidden_size], added up; `InIndx`: [seq_len, top_k], a token's rows, or -1."""
    call.refuse("XScale", "OutExpectedScale", "OutActualScale", "HAS_IN_MX_SCALE", "HAS_OUT_MX_SCALE")
    x, out, index = call.tensor("X"), call.tensor("Out"), call.optional("InIndx")
    if x.dim() != 4 or x.shape[1] != 1 or {"alpha", "limit"} & set(call.arguments):
        raise Unrecognized("it applies an activation, too")
    return rows_instance(x[:, 0], out, index)


@family("moe_sum", "triton::_reduce")
def reduce(call: Invocation) -> KernelInstance:
    """`X`: three dimensions, of which the experts of each token are added up, or the first one, parts of K.

    `Mask`: as `X`, of each row whether it counts.
    """
    call.refuse("XMx", "YMx", "Scale", "XFlex", "YFlexExpected", "YFlexActual", "YFlexChecksum")
    call.refuse("POSTPROCESS_FN1", "POSTPROCESS_FN2")
    x, out, mask, sizes = call.tensor("X"), call.tensor("Y"), call.optional("Mask"), [call[n] for n in REDUCED_SIZES]
    layouts = {(*view.shape, *view.stride(), view.shape[2]): view for view in (x, x.movedim(1, 0)) if x.dim() == 3}
    parts = layouts.get(tuple(sizes))
    if parts is None or out.shape != parts.shape[1:] or {"alpha", "limit"} & set(call.arguments):
        raise Unrecognized("other sums than of rows, or an activation of them")
    if parts is x and mask is None:
        return rows_instance(x, out)
    whole_rows = mask is None or (mask.dtype == torch.bool and mask.shape == x.shape and mask.stride(2) == 0)
    if parts is x or out.dtype != x.dtype or not whole_rows:
        raise Unrecognized("another mask, or another type")
    return sum_instance(x, out, used=None if mask is None else mask[..., 0])


REDUCED_SIZES = ("K", "S0", "X_S1", "stride_xr", "stride_x0", "stride_x1", "Y_S1")


def rows_instance(x: torch.Tensor, out: torch.Tensor, index: torch.Tensor | None = None) -> KernelInstance:
    """`x`: [parts of K, num_rows, hidden_size]; `index`: [seq_len, top_k], a token's rows, or -1."""
    parts, rows, h = x.shape
    inputs = {"expert_outputs": tensor_arg(x, "num_parts", "num_rows", "hidden_size")}
    axes: dict[str, int | None] = {"num_parts": parts, "num_rows": None, "hidden_size": h}
    written, word = ("num_rows", "hidden_size"), ""
    if index is not None:
        inputs["permuted_rows"] = tensor_arg(index, "seq_len", "top_k")
        axes |= {"seq_len": None, "top_k": index.shape[1]}
        written, word = ("seq_len", "hidden_size"), f"_topk{index.shape[1]}"
    return KernelInstance(
        name=f"moe_sum_rows{abbreviate(x.dtype, torch.bfloat16)}"
        f"{'' if out.dtype == x.dtype else f'_to{abbreviate(out.dtype, x.dtype)}'}_parts{parts}{word}_h{h}",
        op_type="moe_sum_rows",
        axes=axes,
        inputs=inputs,
        outputs={"output": lazy_arg(out.dtype, written, lambda: out.reshape(-1, h))},
        reference=SUM.format(
            inputs=", ".join(inputs),
            h=h,
            rows="" if index is None else ROWS,
            dtype=str(out.dtype).removeprefix("torch."),
        ),
        description="The sum of each token's rows.",
        flops=parts * (rows if index is None else index.numel()) * h,
        touched=None
        if index is None
        else lambda: parts * index.numel() * h * x.element_size() + total_bytes(index, out),
    )


cost_function("moe_sum_rows")(CostInputs.whole)  # FLOPs are few, and not counted


@valid_input("permuted_rows", op_types=("moe_sum_rows",))
def rows_of_tokens(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    shape, rows = draft.shape(name), draft.size("num_rows")
    return None if rows is None else draft.distinct(shape[0] * shape[1], rows).reshape(shape)


@replay_rule("triton::_reduce_grouped")
class ReduceGrouped(ReplayRule):
    """Each token's rows are some of all, no two the same."""

    def prepare(self, bound: BoundCall) -> None:
        index = bound["InIndx"]
        if isinstance(index, TensorSpec) and bound.content("InIndx") is None:
            rows = max(bound.spec("X").shape[2], 1)
            bound.set_content(
                "InIndx", torch.randperm(max(rows, index.numel))[: index.numel].reshape(index.shape) % rows
            )


@replay_rule("triton::_topk_forward")
class TopkForward(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "Yi", "Bits", "S", "PeerYis", "PeerBits")


@replay_rule("triton::_sum_bitmatrix_memset", "triton::_sum_bitmatrix_rows")
class SumBitmatrix(ReplayRule):
    """Any bits are a set of experts. It adds to `Out` (the older one to `Ret`), for whole words of them."""

    added_to = ("Out",)

    def prepare(self, bound: BoundCall) -> None:
        set_words(bound, "B")
        for name, counts in (("Out", "OutPartials"), ("Ret", "Partials")):
            partial, out = bound[counts], bound[name]
            if isinstance(partial, TensorSpec) and isinstance(out, TensorSpec) and len(partial.shape) == 2:
                bound.set_value(name, replace(out, shape=(max(partial.shape[1], out.numel),)))
        set_zeros(bound, "Ret", "Partials", "Out", "OutPartials")


@replay_rule("triton::_combined_routing_memset")
class RoutingMemset(ReplayRule):
    """It sums histograms up; by none of their values memory is walked.

    The schedule is filled in whole rows of `BLOCK_A`: its table becomes as wide as its rows are apart.
    """

    def prepare(self, bound: BoundCall) -> None:
        schedule, experts = bound.spec("MDTileInfo"), bound.spec("ExpertHist").numel
        width = schedule.effective_strides[0]
        filled = (bound.integer("blocks1a") - bound.integer("SIZES") - 1) * bound.integer("BLOCK_A")
        if filled > schedule.shape[0] * width:
            raise Skip("its table 'MDTileInfo' ends before what it fills")
        bound.set_value("MDTileInfo", replace(schedule, shape=(schedule.shape[0], width)))
        set_indices_below(bound, "PartialHist", HISTOGRAM_ROWS + 1)
        if bound.content("ExpertHist") is None:
            counts = bound.contents[str(bound.index("PartialHist"))].sum(dim=0)
            bound.set_content("ExpertHist", counts[:experts])
        set_zeros(bound, "Indx", "FinalExpertOffs", "MDStarts", "MDTileInfo")


HISTOGRAM_ROWS = 32  # tokens that a row of the partial histograms counts: HIST_BLOCK_M of `SortTokens`


@replay_rule("triton::_combined_routing_compute", "triton::_combined_routing_compute_pow2")
class RoutingCompute(ReplayRule):
    """It writes where offsets say: they are made from the tokens' experts, drawn if they were not recorded."""

    def prepare(self, bound: BoundCall) -> None:
        (tokens, k), experts = bound.spec("ExptIndx").shape, bound.spec("Hist").shape[0]
        ids = bound.content("ExptIndx")
        if ids is None:
            ids = drawn_experts(bound, tokens, k, experts).sort(dim=-1).values
        ids = ids.to(torch.int64).clamp(0, experts - 1)
        partial, tiles = bound.spec("PartialOffs").shape, bound.spec("MDTileStarts").shape
        if partial[0] * HISTOGRAM_ROWS < tokens:
            raise Skip(f"its partial histograms are not of {HISTOGRAM_ROWS} tokens each")
        counts, block_starts = starts_by_block(ids, partial[0], experts, HISTOGRAM_ROWS)
        first = bound.integer("first_tile_dim_log2")
        starts = starts_of_blocks(counts, range(first, first + tiles[0]))
        bound.set_content("ExptIndx", ids)
        bound.set_content("Hist", counts)
        bound.set_content("TokensStart", counts.cumsum(0) - counts)
        bound.set_content("PartialOffs", torch.nn.functional.pad(block_starts, (0, partial[1] - experts)))
        bound.set_content("MDTileStarts", starts[:, : tiles[1]])
        set_zeros(bound, "GatherIndx", "ScatterIndx", "MDTileInfo")


def starts_by_block(ids: torch.Tensor, blocks: int, experts: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token's experts, int64 [tokens, top_k], -1: none: the tokens of each expert, [experts], and those before
    each block of `size` tokens, [blocks, experts].
    """
    chosen = torch.zeros(len(ids), experts + 1, dtype=torch.int64)
    chosen.scatter_add_(1, ids.where(ids >= 0, experts), torch.ones_like(ids))
    counts = torch.zeros(blocks, experts, dtype=torch.int64)
    counts.index_add_(0, torch.arange(len(ids)) // size, chosen[:, :experts])
    return counts.sum(dim=0), counts.cumsum(dim=0) - counts


def starts_of_blocks(counts: torch.Tensor, shifts: range) -> torch.Tensor:
    """The blocks of each size before each expert's, and all: int64 [shifts, experts + 1]."""
    return torch.stack([torch.nn.functional.pad(blocks_of(counts, s).cumsum(0), (1, 0)) for s in shifts])


def blocks_of(counts: torch.Tensor, shift: int) -> torch.Tensor:
    """How many blocks of 2 ** `shift` rows each expert has."""
    return (counts + (1 << shift) - 1) >> shift

"""Kernels of OpenAI's `triton_kernels` around `matmul_ogs`: routing, and sums of the products' rows.

Routing sorts by expert in steps (`_combined_routing_*`), each of which has a replay rule.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.families.gemm.weight_only import set_words
from kcap.schemas.derive.families.moe.align import drawn_experts
from kcap.schemas.derive.index_arguments import set_zeros
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
    """`X`: [seq_len, num_experts]; `Yv`, `Yi`: [seq_len, top_k], by rising expert; `Bits`: 32 experts to a word."""
    call.refuse("USE_PROVIDED_INDX")
    x, weights, ids, bits = (call.tensor(name) for name in ("X", "Yv", "Yi", "Bits"))
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
    parts, _, rows, h = x.shape
    inputs = {"expert_outputs": tensor_arg(x[:, 0], "num_parts", "num_rows", "hidden_size")}
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
        set_zeros(bound, "Yi", "Bits", "S")


@replay_rule("triton::_sum_bitmatrix_memset", "triton::_sum_bitmatrix_rows")
class SumBitmatrix(ReplayRule):
    """Any bits are a set of experts."""

    def prepare(self, bound: BoundCall) -> None:
        set_words(bound, "B")
        set_zeros(bound, "Ret", "Partials")


@replay_rule("triton::_combined_routing_memset")
class RoutingMemset(ReplayRule):
    """It sums histograms up; by none of their values memory is walked."""

    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "Indx", "ExpertHist", "FinalExpertOffs", "PartialHist", "MDStarts", "MDTileInfo")


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
        chosen = torch.zeros(tokens, experts, dtype=torch.int64).scatter_add_(1, ids, torch.ones_like(ids))
        counts = chosen.sum(dim=0)
        partial, tiles = bound.spec("PartialOffs").shape, bound.spec("MDTileStarts").shape
        if partial[0] * HISTOGRAM_ROWS < tokens:
            raise Skip(f"its partial histograms are not of {HISTOGRAM_ROWS} tokens each")
        blocks = torch.zeros(partial, dtype=torch.int64)
        blocks[:, :experts].index_add_(0, torch.arange(tokens) // HISTOGRAM_ROWS, chosen)
        first = bound.integer("first_tile_dim_log2")
        sizes = torch.stack([-(-counts // (1 << (first + i))) for i in range(tiles[0])])
        bound.set_content("ExptIndx", ids)
        bound.set_content("Hist", counts)
        bound.set_content("TokensStart", counts.cumsum(0) - counts)
        bound.set_content("PartialOffs", blocks.cumsum(0) - blocks)
        starts = torch.nn.functional.pad(sizes.cumsum(1), (1, 0))
        bound.set_content("MDTileStarts", starts[:, : tiles[1]])
        set_zeros(bound, "GatherIndx", "ScatterIndx", "MDTileInfo")

"""moe_align of `triton_kernels`, with which gpt-oss runs: tokens sorted by expert, from sets of bits.

A slot is a token with one of its experts, a row its place among all slots by expert. `_sum_bitmatrix_rows` counts the
tokens of each expert, over all and in blocks of them. In the newer package, which SGLang has, stage 1 makes starts of
both counts, and stage 2 from these the rows. ragged.py has what follows, blocks of rows, and the two launches in which
the older package, vLLM's, does all of this.
"""

from __future__ import annotations

import re

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.families.moe.align import drawn_experts
from kcap.schemas.derive.families.moe.fused import expert_ids
from kcap.schemas.derive.families.moe.triton_kernels import in_rows, starts_by_block
from kcap.schemas.derive.index_arguments import set_indices_below, set_zeros
from kcap.schemas.derive.invocation import Invocation, Unrecognized, has_strides, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.flashinfer.definition import Definition
from kcap.schemas.flashinfer.descriptions import BEFORE, FOR_ITS_LENGTH

COUNTS = """import torch


@torch.no_grad()
def run(expert_bits, expert_counts, block_counts):
    assert expert_bits.shape[-1] == {words}
    chosen = expert_bits.to(torch.int64)[..., None] >> torch.arange(32, device=expert_bits.device) & 1
    rows = torch.nn.functional.pad(chosen.flatten(1), (0, 0, 0, {block} * len(block_counts) - len(chosen)))
    counts = rows.unflatten(0, (-1, {block})).sum(dim=1)
    return (expert_counts + counts.sum(dim=0)).to(torch.int32), counts.to(torch.int32)
"""
STARTS = """import torch


@torch.no_grad()
def run(expert_counts, block_counts, slots):
    assert len(expert_counts) == {e}
    block_starts = block_counts.clone(memory_format=torch.contiguous_format)
    block_starts[:, :{e}] = block_counts[:, :{e}].cumsum(dim=0) - block_counts[:, :{e}]
    return block_starts, (expert_counts.cumsum(dim=0) - expert_counts).to(torch.int32), torch.full_like(slots, {value})
"""
ROWS = """import torch


@torch.no_grad()
def run(topk_ids, block_starts, expert_starts, sorted_slots, slot_rows):
{sort}    return sorted_slots_out, slot_rows_out
"""
SORT = """    assert topk_ids.shape[-1] == {k} and block_starts.shape[-1] == {columns}
    ids = topk_ids.flatten().to(torch.int64)
    (slots,) = torch.where(ids >= 0)
    ids, blocks = ids[slots], slots // {size}
    groups = blocks * {columns} + ids
    order, counts = groups.argsort(stable=True), torch.bincount(groups)
    within = torch.empty_like(order)
    within[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[groups[order]]
    rows = block_starts[blocks, ids] + expert_starts[ids] + within
    sorted_slots_out, slot_rows_out = sorted_slots.clone(), slot_rows.clone()
    sorted_slots_out[rows] = slots.to(torch.int32)
    slot_rows_out[slots] = rows.to(torch.int32)
"""


SORTED = ("moe_align_rows", "moe_align_combined_rows")  # op_types


def require_integers(*tensors: torch.Tensor) -> None:
    if any(tensor.dtype != torch.int32 for tensor in tensors):
        raise Unrecognized("its counts are no int32")


@family("moe_align", "triton::_sum_bitmatrix_rows")
def count_tokens(call: Invocation) -> KernelInstance:
    """`B`: [seq_len, num_words], 32 experts to a word; `Out`, vLLM's `Ret`: [num_experts], to which it adds."""
    bits, out, partial = call.tensor("B"), call.tensor("Out", "Ret"), call.tensor("OutPartials", "Partials")
    block, tile, words = int(call.number("BLOCK_M")), int(call.number("BLOCK_MM")), bits.shape[1]
    require_integers(out, partial)
    if call["shape_bm"] != len(bits) or not len(out) == partial.shape[1] == 32 * words:
        raise Unrecognized("it takes some of the rows, or has experts of a part of a word")
    tables = (
        has_strides(bits, call["stride_bm"], call["stride_bn"]),
        has_strides(partial, call["stride_pm"], call["stride_pn"]),
    )
    if not all(tables) or not has_strides(out, 1):
        raise Unrecognized("its tables lie otherwise than its arguments say")
    if len(partial) * block != -(-len(bits) // tile) * tile:
        raise Unrecognized("it counts some of the blocks")
    return KernelInstance(
        name=f"moe_align_counts_e{len(out)}_bs{block}",
        op_type="moe_align_counts",
        axes={"seq_len": None, "num_words": words, "num_experts": len(out), "num_blocks": None},
        inputs={
            "expert_bits": TensorArg(
                ("seq_len", "num_words"), "int32", lambda: in_rows(bits), "32 experts to a word.", any_bits=True
            ),
            "expert_counts": tensor_arg(out, "num_experts", description=BEFORE),
            "block_counts": tensor_arg(partial, "num_blocks", "num_experts", description=FOR_ITS_LENGTH),
        },
        outputs={
            "expert_counts_out": lazy_arg("int32", ("num_experts",), lambda: out),
            "block_counts_out": lazy_arg("int32", ("num_blocks", "num_experts"), lambda: partial),
        },
        reference=COUNTS.format(words=words, block=block),
        description=f"The tokens of each expert, added to what was counted before, and those of each {block} tokens.",
        touched=lambda: total_bytes(bits, partial) + 2 * total_bytes(out),
    )


@family("moe_align", "triton::_bitmatrix_metadata_compute_stage1")
def starts_of_counts(call: Invocation) -> KernelInstance:
    """`ColSum`, `ColOffs`: [num_experts], `PartialColSum`: [num_blocks, num_columns], column by column."""
    counts, partial, slots = (call.tensor(name) for name in ("ColSum", "PartialColSum", "CombinedIndx"))
    starts, e, value = call.tensor("ColOffs"), call["n_cols"], call["sentinel"]
    require_integers(counts, partial, slots, starts)
    sizes = (call["shape_pm"], call["n_combined_indx"], call["stride_pm"], e)
    laid_out = has_strides(partial, 1, call["stride_pn"])
    if sizes != (len(partial), len(slots), 1, len(counts)) or not laid_out or not isinstance(value, int):
        raise Unrecognized("it takes some of its tables, or their rows lie apart")
    cells = ("num_blocks", "num_columns")
    return KernelInstance(
        name=f"moe_align_starts_e{e}_c{partial.shape[1]}",
        op_type="moe_align_starts",
        axes={"num_experts": e, "num_columns": partial.shape[1], "num_blocks": None, "num_slots": None},
        inputs={
            "expert_counts": tensor_arg(counts, "num_experts", description="The tokens of each expert."),
            "block_counts": tensor_arg(partial, *cells, description="The tokens of each expert in each block of them."),
            "slots": tensor_arg(slots, "num_slots", description=FOR_ITS_LENGTH),
        },
        outputs={
            "block_starts": lazy_arg("int32", cells, lambda: partial, "How many of each expert are in blocks before."),
            "expert_starts": lazy_arg("int32", ("num_experts",), lambda: starts),
            "slots_out": lazy_arg("int32", ("num_slots",), lambda: slots),
        },
        reference=STARTS.format(e=e, value=value),
        description=f"Where each expert's rows start, over all and in each block of tokens; slots are {value}.",
        in_place=(("block_counts", "block_starts"), ("slots", "slots_out")),
        touched=lambda: total_bytes(counts, starts, slots) + 2 * total_bytes(partial),
    )


@family("moe_align", "triton::_bitmatrix_metadata_compute_stage2")
def rows_of_slots(call: Invocation) -> KernelInstance:
    """`NonzeroIndx`: [seq_len, top_k], -1: no expert; `ColSortedIndx`, `RowSortedIndx`: [seq_len * top_k]."""
    ids, partial, starts = (call.tensor(name) for name in ("NonzeroIndx", "ColPartialSum", "ColOffs"))
    slots, rows = call.tensor("ColSortedIndx"), call.tensor("RowSortedIndx")
    block, (tokens, k), (_, columns) = int(call.number("BLOCK_PER_TOK")), ids.shape, partial.shape
    require_integers(partial, starts, slots, rows)
    if (call["n_tokens"], call["TOKS_PER_ROW"]) != (tokens, k) or ids.dtype != torch.int16:
        raise Unrecognized("it takes some of the tokens")
    return KernelInstance(
        name=f"moe_align_rows_topk{k}_e{len(starts)}_c{columns}_bs{block}",
        op_type="moe_align_rows",
        axes={
            "seq_len": None,
            "top_k": k,
            "num_experts": len(starts),
            "num_columns": columns,
            "num_blocks": None,
            "num_slots": None,
        },
        inputs={
            "topk_ids": tensor_arg(ids, "seq_len", "top_k", description="Experts; -1: none."),
            "block_starts": tensor_arg(partial, "num_blocks", "num_columns"),
            "expert_starts": tensor_arg(starts, "num_experts"),
            "sorted_slots": tensor_arg(slots, "num_slots", description=BEFORE),
            "slot_rows": tensor_arg(rows, "num_slots", description=BEFORE),
        },
        outputs={
            "sorted_slots_out": lazy_arg("int32", ("num_slots",), lambda: slots, "The slot of each row."),
            "slot_rows_out": lazy_arg("int32", ("num_slots",), lambda: rows, "The row of each slot."),
        },
        reference=ROWS.format(sort=SORT.format(k=k, columns=columns, size=block * k)),
        description=f"Slots sorted by expert, from where the rows of each expert and of each {block} tokens start.",
        constraints=("num_slots == seq_len * top_k", f"num_blocks == (seq_len + {block - 1}) // {block}"),
        touched=lambda: total_bytes(ids, partial, starts, slots, rows),
    )


@cost_function("moe_align_counts", "moe_align_starts", "moe_align_combined_starts", "moe_align_rows")
def align_cost(inputs: CostInputs) -> Cost:
    names = ("expert_bits", "expert_counts", "topk_ids", "block_starts", "expert_starts")
    read = [*names, *(["block_counts"] if "slots" in inputs else [])]
    return inputs.cost(inputs.read(*(name for name in read if name in inputs)))


def block_size(definition: Definition, word: str = "bs") -> int:
    """Of a block, which no axis says, by the `word` for it in the name; other words may follow."""
    found = re.search(rf"_{word}(\d{{1,9}})", definition.name)
    if found is None:
        raise Unrecognized(f"its name does not say the size of a block: _{word}16, say")
    return int(found[1])


@valid_input("expert_bits", op_types=("moe_align_counts",))
def valid_bits(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Any are a set of experts."""
    return draft.integers(-(1 << 31), 1 << 31, draft.shape(name))


@valid_input("topk_ids", op_types=SORTED)
def valid_ids(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """Other experts for each token, by rising number."""
    ids = expert_ids(draft, name)
    return None if ids is None else ids.sort(dim=-1).values


@valid_input("expert_starts", op_types=SORTED)
def valid_expert_starts(draft: WorkloadDraft, name: str) -> torch.Tensor:
    ids, (experts,) = draft["topk_ids"].cpu().long(), draft.shape(name)
    counts = torch.bincount(ids[ids >= 0].flatten(), minlength=experts)
    return counts.cumsum(0) - counts


@valid_input("block_starts", op_types=SORTED)
def valid_block_starts(draft: WorkloadDraft, name: str) -> torch.Tensor:
    blocks, columns = draft.shape(name)
    return starts_by_block(draft["topk_ids"].cpu().long(), blocks, columns, block_size(draft.definition))[1]


@replay_rule("triton::_bitmatrix_metadata_compute_stage1")
class StartsOfCounts(ReplayRule):
    """By none of its values memory is walked."""

    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "CombinedIndx", "ColOffs")
        set_indices_below(bound, "PartialColSum", 33)
        if bound.content("ColSum") is None:
            counts = bound.contents[str(bound.index("PartialColSum"))].sum(dim=0)
            bound.set_content("ColSum", counts[: bound.spec("ColSum").numel])


@replay_rule("triton::_bitmatrix_metadata_compute_stage2")
class RowsOfSlots(ReplayRule):
    """It writes where starts say: they are made from the tokens' experts, drawn if they were not recorded."""

    idempotent_writes = ("ColSortedIndx", "RowSortedIndx")

    def prepare(self, bound: BoundCall) -> None:
        (tokens, k), (experts,) = bound.spec("NonzeroIndx").shape, bound.spec("ColOffs").shape
        blocks, columns = bound.spec("ColPartialSum").shape
        ids, block = bound.content("NonzeroIndx"), bound.integer("BLOCK_PER_TOK")
        if ids is None:
            ids = drawn_experts(bound, tokens, k, experts).sort(dim=-1).values
        ids = ids.to(torch.int64).clamp(-1, experts - 1)
        if blocks * block < tokens or columns < experts:
            raise Skip("its starts are not those of all tokens and experts")
        counts, block_starts = starts_by_block(ids, blocks, columns, block)
        bound.set_content("NonzeroIndx", ids)
        bound.set_content("ColPartialSum", block_starts)
        bound.set_content("ColOffs", (counts.cumsum(0) - counts)[:experts])
        set_zeros(bound, "ColSortedIndx", "RowSortedIndx")

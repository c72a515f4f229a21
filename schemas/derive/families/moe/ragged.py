"""moe_align of `triton_kernels`, its last part: blocks of rows, of each size that a product may take.

Of the newer package, `_ragged_tensor_metadata_memset` sums up the rows of the experts before each, and their blocks of
each size, and fills the schedules with -1; `_ragged_tensor_metadata_compute` writes into these for each block its
expert, and its number among the expert's in the upper half. The first fills whole rows of 512, of which its arguments
are the beginning.

The older package, vLLM's, does this beside what bitmatrix.py has: `_combined_routing_memset` as stage 1 and the first,
`_combined_routing_compute` as stage 2 and the second, where weights are sorted by expert, too. triton_kernels.py has
their replay rules.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.families.moe.align import drawn_experts
from kcap.schemas.derive.families.moe.bitmatrix import SORT, block_size, require_integers
from kcap.schemas.derive.families.moe.triton_kernels import blocks_of, starts_of_blocks
from kcap.schemas.derive.index_arguments import set_zeros
from kcap.schemas.derive.invocation import Invocation, Unrecognized, has_strides, require_values, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.flashinfer.definition import Definition
from kcap.schemas.flashinfer.descriptions import BEFORE, FOR_ITS_LENGTH

STARTS = """import torch


@torch.no_grad()
def run(expert_counts, block_schedule):
    assert len(expert_counts) == {e}
    shifts = torch.tensor([0, *range({first}, {first} + {sizes})], device=expert_counts.device)[:, None]
    blocks = (expert_counts + (1 << shifts) - 1) >> shifts
    starts = torch.nn.functional.pad(blocks.cumsum(dim=1), (1, 0))
    return starts.to(torch.int32), torch.full_like(block_schedule, -1, memory_format=torch.contiguous_format)
"""
SCHEDULE = """import torch


@torch.no_grad()
def run(expert_counts, block_starts, block_schedule):
{fill}    return schedule
"""
FILL = """    assert {starts}.shape == ({sizes}, {e} + 1)
    schedule = block_schedule.clone(memory_format=torch.contiguous_format)
    for i in range({sizes}):
        shift = {first} + i
        blocks = (expert_counts.to(torch.int64) + (1 << shift) - 1) >> shift
        experts = torch.arange({e}, device=blocks.device).repeat_interleave(blocks)
        numbers = torch.arange(len(experts), device=blocks.device) - (blocks.cumsum(0) - blocks)[experts]
        schedule[i, {starts}[i, experts] + numbers] = (numbers << 16 | experts).to(torch.int32)
"""
COMBINED_STARTS = """import torch


@torch.no_grad()
def run(expert_counts, block_counts, slots, block_schedule):
    assert len(expert_counts) == {e}
    block_starts = block_counts.clone(memory_format=torch.contiguous_format)
    block_starts[:, :{e}] = block_counts[:, :{e}].cumsum(dim=0) - block_counts[:, :{e}]
    shifts = torch.tensor([0, *range({first}, {first} + {sizes})], device=expert_counts.device)[:, None]
    blocks = (expert_counts + (1 << shifts) - 1) >> shifts
    schedule_starts = torch.nn.functional.pad(blocks.cumsum(dim=1), (1, 0)).to(torch.int32)
    schedule = torch.full_like(block_schedule, -1, memory_format=torch.contiguous_format)
    return schedule_starts[0, :-1], block_starts, schedule_starts, torch.full_like(slots, {value}), schedule
"""
COMBINED_ROWS = """import torch


@torch.no_grad()
def run({inputs}):
{sort}    sorted_weights_out = sorted_weights.clone()
    sorted_weights_out[rows] = topk_weights.flatten()[slots]
{fill}    return sorted_slots_out, slot_rows_out, sorted_weights_out, schedule
"""
SCHEDULES, COUNTED = ("num_sizes", "num_blocks"), "The rows of each expert."


@family("moe_align", "triton::_ragged_tensor_metadata_memset")
def block_starts(call: Invocation) -> KernelInstance:
    """`SliceSizes`: [num_experts]; `BlockOffs`: [num_sizes + 1, num_experts + 1], `BlockSchedule`: [num_sizes, …]."""
    counts, starts, schedule = (call.tensor(name) for name in ("SliceSizes", "BlockOffs", "BlockSchedule"))
    sizes, first, e = int(call.number("SIZES")), int(call.number("first_block_size_log2")), len(counts)
    require_integers(counts, starts, schedule)
    if call["n_slices"] != e or len(starts) != sizes + 1 or len(schedule) != sizes or starts.shape[1] <= e:
        raise Unrecognized("its tables are not those of its experts")
    return KernelInstance(
        name=f"moe_align_block_starts_e{e}_n{sizes}_bs{1 << first}",
        op_type="moe_align_block_starts",
        axes={
            "num_experts": e,
            "num_starts": e + 1,
            "num_sizes": sizes,
            "num_tables": sizes + 1,
            "num_blocks": None,
        },
        inputs={
            "expert_counts": tensor_arg(counts, "num_experts", description=COUNTED),
            "block_schedule": tensor_arg(schedule, *SCHEDULES, description=FOR_ITS_LENGTH),
        },
        outputs={
            "block_starts": lazy_arg(
                "int32", ("num_tables", "num_starts"), lambda: starts[:, : e + 1], "Of rows, then of blocks by size."
            ),
            "block_schedule_out": lazy_arg("int32", SCHEDULES, lambda: schedule, "-1: no block."),
        },
        reference=STARTS.format(e=e, first=first, sizes=sizes),
        description=f"Where each expert's rows start, and its blocks of {1 << first} rows, twice as many, and so on.",
        touched=lambda: total_bytes(counts, schedule, starts[:, : e + 1]),
    )


@family("moe_align", "triton::_ragged_tensor_metadata_compute")
def block_schedule(call: Invocation) -> KernelInstance:
    """`SliceSizes`: [num_experts]; `BlockOffs`: [num_sizes, num_experts + 1], `BlockSchedule`: [num_sizes, …]."""
    counts, starts, schedule = (call.tensor(name) for name in ("SliceSizes", "BlockOffs", "BlockSchedule"))
    sizes, first, e = int(call.number("SIZES")), int(call.number("first_block_size_log2")), len(counts)
    require_integers(counts, starts, schedule)
    if len(starts) != sizes or len(schedule) != sizes or starts.shape[1] != e + 1:
        raise Unrecognized("its tables are not those of its experts")

    def touched() -> int:
        rows = require_values(counts, "rows of the experts").to(torch.int64)
        return total_bytes(counts, starts) + written_bytes(rows, sizes, first)

    return KernelInstance(
        name=f"moe_align_blocks_e{e}_n{sizes}_bs{1 << first}",
        op_type="moe_align_blocks",
        axes={"num_experts": e, "num_starts": e + 1, "num_sizes": sizes, "num_blocks": None},
        inputs={
            "expert_counts": tensor_arg(counts, "num_experts", description=COUNTED),
            "block_starts": tensor_arg(starts, "num_sizes", "num_starts"),
            "block_schedule": tensor_arg(schedule, *SCHEDULES, description=BEFORE),
        },
        outputs={
            "block_schedule_out": lazy_arg(
                "int32", SCHEDULES, lambda: schedule, "A block's expert, and its number in the upper half."
            )
        },
        reference=SCHEDULE.format(fill=FILL.format(starts="block_starts", e=e, first=first, sizes=sizes)),
        description=f"The expert of each block of {1 << first} rows, of twice as many, and so on.",
        touched=touched,
    )


@family("moe_align", "triton::_combined_routing_memset")
def combined_starts(call: Invocation) -> KernelInstance:
    """`PartialHist`: of blocks of tokens; `MDStarts`: whole rows of `BLOCK_A`, one more than `MDTileInfo` has."""
    counts, offsets, partial = (call.tensor(name) for name in ("ExpertHist", "FinalExpertOffs", "PartialHist"))
    starts, schedule, slots = (call.tensor(name) for name in ("MDStarts", "MDTileInfo", "Indx"))
    sizes, first, e, value = int(call.number("SIZES")), first_tile(call), len(counts), call["sentinel"]
    require_integers(counts, offsets, partial, starts, schedule, slots)
    lengths = tuple(call[name] for name in ("hist_size", "n_expts_tot", "shape_pm", "size"))
    if lengths != (e, e, len(partial), len(slots)) or len(offsets) != e or partial.shape[1] < e:
        raise Unrecognized("it takes some of its tables")
    if len(starts) != sizes + 1 or starts.shape[1] <= e or len(schedule) != sizes or not isinstance(value, int):
        raise Unrecognized("its tables are not those of its experts")
    filled = (int(call.number("blocks1a")) - sizes - 1) * int(call.number("BLOCK_A"))
    whole = filled >= (sizes - 1) * schedule.stride(0) + schedule.shape[1]
    if not whole or not laid_out(call, partial, starts, schedule, counts, offsets, slots):
        raise Unrecognized("its tables lie otherwise than its arguments say")
    cells = ("num_token_blocks", "num_columns")
    return KernelInstance(
        name=f"moe_align_combined_starts_e{e}_c{partial.shape[1]}_n{sizes}_tile{1 << first}",
        op_type="moe_align_combined_starts",
        axes={
            "num_experts": e,
            "num_columns": partial.shape[1],
            "num_starts": e + 1,
            "num_sizes": sizes,
            "num_tables": sizes + 1,
            "num_token_blocks": None,
            "num_slots": None,
            "num_blocks": None,
        },
        inputs={
            "expert_counts": tensor_arg(counts, "num_experts", description=COUNTED),
            "block_counts": tensor_arg(partial, *cells, description="The tokens of each expert in each block of them."),
            "slots": tensor_arg(slots, "num_slots", description=FOR_ITS_LENGTH),
            "block_schedule": tensor_arg(schedule, *SCHEDULES, description=FOR_ITS_LENGTH),
        },
        outputs={
            "expert_starts": lazy_arg("int32", ("num_experts",), lambda: offsets, "The first row of each expert."),
            "block_starts": lazy_arg("int32", cells, lambda: partial, "How many of each expert are in blocks before."),
            "schedule_starts": lazy_arg(
                "int32", ("num_tables", "num_starts"), lambda: starts[:, : e + 1], "Of rows, then of blocks by size."
            ),
            "slots_out": lazy_arg("int32", ("num_slots",), lambda: slots),
            "block_schedule_out": lazy_arg("int32", SCHEDULES, lambda: schedule, "-1: no block."),
        },
        reference=COMBINED_STARTS.format(e=e, first=first, sizes=sizes, value=value),
        description=f"Where each expert's rows start, over all and in each block of tokens, and blocks of {1 << first} "
        "rows, twice as many, and so on.",
        in_place=(("block_counts", "block_starts"), ("slots", "slots_out"), ("block_schedule", "block_schedule_out")),
        touched=lambda: total_bytes(counts, offsets, starts[:, : e + 1], slots, schedule) + 2 * total_bytes(partial),
    )


@family("moe_align", "triton::_combined_routing_compute")
def combined_rows(call: Invocation) -> KernelInstance:
    """`ExptIndx`, `ExptScal`: [seq_len, top_k], -1: no expert; `MDTileStarts`: [num_sizes, num_experts + 1]."""
    ids, weights, partial = (call.tensor(name) for name in ("ExptIndx", "ExptScal", "PartialOffs"))
    offsets, counts, starts = (call.tensor(name) for name in ("TokensStart", "Hist", "MDTileStarts"))
    slots, rows, sorted_weights = (call.tensor(name) for name in ("GatherIndx", "ScatterIndx", "GateScal"))
    schedule, sizes, first = call.tensor("MDTileInfo"), int(call.number("SIZES")), first_tile(call)
    block, (tokens, k), e = int(call.number("BLOCK_M")), ids.shape, len(counts)
    require_integers(partial, offsets, counts, starts, slots, rows, schedule)
    if (call["n_tokens"], call["N_EXPTS_ACT"], call["blocks2a"]) != (tokens, k, sizes * e) or ids.dtype != torch.int16:
        raise Unrecognized("it takes some of the tokens or experts")
    all_rows = all(tensor.shape == (tokens * k,) for tensor in (slots, rows, sorted_weights))
    if not all_rows or sorted_weights.dtype != weights.dtype:
        raise Unrecognized("not every token and expert has a row")
    tables = (weights.shape, len(offsets), starts.shape, len(schedule), len(partial))
    if tables != (ids.shape, e, (sizes, e + 1), sizes, -(-tokens // block)) or partial.shape[1] < e:
        raise Unrecognized("its tables are not those of its tokens and experts")
    whole = ids.is_contiguous() and weights.is_contiguous()
    if not whole or not laid_out(call, partial, starts, schedule, offsets, counts, slots, rows, sorted_weights):
        raise Unrecognized("its tables lie otherwise than its arguments say")
    inputs = {
        "topk_ids": tensor_arg(ids, "seq_len", "top_k", description="Experts; -1: none."),
        "topk_weights": tensor_arg(weights, "seq_len", "top_k"),
        "block_starts": tensor_arg(partial, "num_token_blocks", "num_columns"),
        "expert_starts": tensor_arg(offsets, "num_experts"),
        "expert_counts": tensor_arg(counts, "num_experts", description=COUNTED),
        "schedule_starts": tensor_arg(starts, "num_sizes", "num_starts"),
        "sorted_slots": tensor_arg(slots, "num_slots", description=BEFORE),
        "slot_rows": tensor_arg(rows, "num_slots", description=BEFORE),
        "sorted_weights": tensor_arg(sorted_weights, "num_slots", description=BEFORE),
        "block_schedule": tensor_arg(schedule, *SCHEDULES, description=BEFORE),
    }

    def touched() -> int:
        read = total_bytes(ids, weights, partial, offsets, counts, starts)
        written = written_bytes(require_values(counts, "rows of the experts").to(torch.int64), sizes, first)
        return read + total_bytes(slots, rows, sorted_weights) + written

    columns, word = partial.shape[1], abbreviate(weights.dtype, torch.bfloat16)
    return KernelInstance(
        name=f"moe_align_combined_rows{word}_topk{k}_e{e}_c{columns}_bs{block}_n{sizes}_tile{1 << first}",
        op_type="moe_align_combined_rows",
        axes={
            "seq_len": None,
            "top_k": k,
            "num_experts": e,
            "num_columns": columns,
            "num_starts": e + 1,
            "num_sizes": sizes,
            "num_token_blocks": None,
            "num_slots": None,
            "num_blocks": None,
        },
        inputs=inputs,
        outputs={
            "sorted_slots_out": lazy_arg("int32", ("num_slots",), lambda: slots, "The slot of each row."),
            "slot_rows_out": lazy_arg("int32", ("num_slots",), lambda: rows, "The row of each slot."),
            "sorted_weights_out": lazy_arg(
                weights.dtype, ("num_slots",), lambda: sorted_weights, "The weight of each row."
            ),
            "block_schedule_out": lazy_arg(
                "int32", SCHEDULES, lambda: schedule, "A block's expert, and its number in the upper half."
            ),
        },
        reference=COMBINED_ROWS.format(
            inputs=", ".join(inputs),
            sort=SORT.format(k=k, columns=columns, size=block * k),
            fill=FILL.format(starts="schedule_starts", e=e, first=first, sizes=sizes),
        ),
        description=f"Slots and weights sorted by expert, and the expert of each block of {1 << first} rows, of twice "
        "as many, and so on.",
        constraints=("num_slots == seq_len * top_k", f"num_token_blocks == (seq_len + {block - 1}) // {block}"),
        touched=touched,
    )


def first_tile(call: Invocation) -> int:
    exponent = call.number("first_tile_dim_log2")
    if exponent not in range(31):
        raise Unrecognized("its least block is of no size that it can have")
    return int(exponent)


def laid_out(
    call: Invocation, partial: torch.Tensor, starts: torch.Tensor, schedule: torch.Tensor, *vectors: torch.Tensor
) -> bool:
    """Whether the tables of a combined kernel lie as its arguments say; the first fills the schedule as a whole."""
    return (
        all(has_strides(vector, 1) for vector in vectors)
        and has_strides(partial, call["stride_pm"], call["stride_pn"])
        and has_strides(starts, call["tile_starts_stridem"], 1)
        and has_strides(schedule, call["tile_info_stridem"], 1)
    )


def written_bytes(counts: torch.Tensor, sizes: int, first: int) -> int:
    """Of the schedules, for experts of that many rows."""
    return sum(4 * int(blocks_of(counts, first + i).sum()) for i in range(sizes))


COMBINED = ("moe_align_combined_starts", "moe_align_combined_rows")  # op_types


def first_shift(definition: Definition) -> int:
    """The exponent of the least size of blocks."""
    return block_size(definition, "tile" if definition.op_type in COMBINED else "bs").bit_length() - 1


@cost_function("moe_align_block_starts", "moe_align_blocks")
def blocks_cost(inputs: CostInputs) -> Cost:
    if "block_starts" not in inputs:
        return inputs.cost(inputs.read("expert_counts"))
    read, first = inputs.read("expert_counts", "block_starts"), first_shift(inputs.definition)
    written = written_bytes(inputs.index("expert_counts"), inputs.sizes["num_sizes"], first)
    return Cost(read + written, read, 0, inputs.dtype)


@cost_function("moe_align_combined_rows")
def combined_rows_cost(inputs: CostInputs) -> Cost:
    read = inputs.read("topk_ids", "topk_weights", "block_starts", "expert_starts", "expert_counts", "schedule_starts")
    written = inputs.read("sorted_slots", "slot_rows", "sorted_weights")
    counts, sizes = inputs.index("expert_counts"), inputs.sizes["num_sizes"]
    written += written_bytes(counts, sizes, first_shift(inputs.definition))
    return Cost(read + written, read, 0, inputs.dtype)


@valid_input("expert_counts", op_types=("moe_align_combined_rows",))
def valid_counts_of_tokens(draft: WorkloadDraft, name: str) -> torch.Tensor:
    ids = draft["topk_ids"].cpu().long()
    return torch.bincount(ids[ids >= 0], minlength=draft.shape(name)[0])


@valid_input("expert_counts", op_types=("moe_align_block_starts", "moe_align_blocks", "moe_align_combined_starts"))
def valid_counts(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """As many rows as have room in the schedule."""
    (experts,), blocks = draft.shape(name), draft.size("num_blocks") or 0
    zeros = torch.zeros(experts, dtype=torch.int64)
    return draft.parts(blocks, zeros, zeros + blocks) << first_shift(draft.definition)


@valid_input("block_starts", op_types=("moe_align_blocks",))
@valid_input("schedule_starts", op_types=("moe_align_combined_rows",))
def valid_block_starts(draft: WorkloadDraft, name: str) -> torch.Tensor:
    first, counts = first_shift(draft.definition), draft["expert_counts"].cpu().long()
    return starts_of_blocks(counts, range(first, first + draft.shape(name)[0]))


@replay_rule("triton::_ragged_tensor_metadata_memset", "triton::_ragged_tensor_metadata_compute")
class RaggedMetadata(ReplayRule):
    """Blocks are written where starts say: these are made from the experts' rows, drawn if they were not recorded.

    `memset` fills whole rows of `BLOCK`: its tables become as wide as their rows are apart.
    """

    idempotent_writes = ("BlockOffs", "BlockSchedule")

    def prepare(self, bound: BoundCall) -> None:
        first, sizes, block = (bound.integer(name) for name in ("first_block_size_log2", "SIZES", "BLOCK"))
        for name in self.idempotent_writes:  # a Sample of a graph has what it wrote
            bound.contents.pop(str(bound.index(name)), None)
        (experts,), width = bound.spec("SliceSizes").shape, bound.spec("BlockSchedule").shape[1]
        counts = bound.content("SliceSizes")
        if counts is None:
            rows = width if width <= experts else experts + ((width - experts) << first)
            counts = torch.bincount(drawn_experts(bound, rows, 1, experts).flatten(), minlength=experts)
        starts = starts_of_blocks(counts.to(torch.int64), range(first, first + sizes))
        if int(starts[:, -1].max()) > width:
            raise Skip(f"its experts have more blocks than the {width} of its schedule")
        bound.set_content("SliceSizes", counts)
        if bound["n_slices"] is None:
            bound.set_content("BlockOffs", starts)
        else:
            for name in ("BlockOffs", "BlockSchedule"):
                spec = bound.spec(name)
                if spec.effective_strides[0] < -(-spec.shape[1] // block) * block:
                    raise Skip(f"its table '{name}' ends before what it fills")
                bound.set_value(name, replace(spec, shape=(spec.shape[0], spec.effective_strides[0])))
        set_zeros(bound, "BlockOffs", "BlockSchedule")

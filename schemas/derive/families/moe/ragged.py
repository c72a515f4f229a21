"""moe_align of the newer `triton_kernels`, its last part: blocks of rows, of each size that a product may take.

`_ragged_tensor_metadata_memset` sums up the rows of the experts before each, and their blocks of each size, and fills
the schedules with -1; `_ragged_tensor_metadata_compute` writes into these for each block its expert, and its number
among the expert's in the upper half. The first fills whole rows of 512, of which its arguments are the beginning.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.families.moe.align import drawn_experts
from kcap.schemas.derive.families.moe.bitmatrix import block_size, require_integers
from kcap.schemas.derive.families.moe.triton_kernels import blocks_of, starts_of_blocks
from kcap.schemas.derive.index_arguments import set_zeros
from kcap.schemas.derive.invocation import Invocation, Unrecognized, require_values, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, lazy_arg, tensor_arg
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
    assert block_starts.shape == ({sizes}, {e} + 1)
    schedule = block_schedule.clone(memory_format=torch.contiguous_format)
    for i in range({sizes}):
        shift = {first} + i
        blocks = (expert_counts.to(torch.int64) + (1 << shift) - 1) >> shift
        experts = torch.arange({e}, device=blocks.device).repeat_interleave(blocks)
        numbers = torch.arange(len(experts), device=blocks.device) - (blocks.cumsum(0) - blocks)[experts]
        schedule[i, block_starts[i, experts] + numbers] = (numbers << 16 | experts).to(torch.int32)
    return schedule
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
        reference=SCHEDULE.format(e=e, first=first, sizes=sizes),
        description=f"The expert of each block of {1 << first} rows, of twice as many, and so on.",
        touched=touched,
    )


def written_bytes(counts: torch.Tensor, sizes: int, first: int) -> int:
    """Of the schedules, for experts of that many rows."""
    return sum(4 * int(blocks_of(counts, first + i).sum()) for i in range(sizes))


def first_shift(definition: Definition) -> int:
    """The exponent of the least size of blocks."""
    return block_size(definition).bit_length() - 1


@cost_function("moe_align_block_starts", "moe_align_blocks")
def blocks_cost(inputs: CostInputs) -> Cost:
    if "block_starts" not in inputs:
        return inputs.cost(inputs.read("expert_counts"))
    read, first = inputs.read("expert_counts", "block_starts"), first_shift(inputs.definition)
    written = written_bytes(inputs.index("expert_counts"), inputs.sizes["num_sizes"], first)
    return Cost(read + written, read, 0, inputs.dtype)


@valid_input("expert_counts", op_types=("moe_align_block_starts", "moe_align_blocks"))
def valid_counts(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """As many rows as have room in the schedule."""
    (experts,), blocks = draft.shape(name), draft.size("num_blocks") or 0
    zeros = torch.zeros(experts, dtype=torch.int64)
    return draft.parts(blocks, zeros, zeros + blocks) << first_shift(draft.definition)


@valid_input("block_starts", op_types=("moe_align_blocks",))
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

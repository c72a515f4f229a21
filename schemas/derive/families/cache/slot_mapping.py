"""slot_mapping: where in the paged cache each token of a batch goes. vLLM's operators, in C++ and in Triton."""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.families.attention.valid_inputs import PAGE_AXES
from kcap.schemas.derive.index_arguments import set_zeros
from kcap.schemas.derive.invocation import Invocation, Unrecognized, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft

REFERENCE = """import torch


@torch.no_grad()
def run(query_start_loc, positions, block_table):
    num_tokens = positions.shape[0]
    token = torch.arange(num_tokens, device=positions.device)
    sequence = torch.searchsorted(query_start_loc[1:].contiguous(), token.to(query_start_loc.dtype), right=True)
    page = block_table[sequence, positions // {page_size}].to(torch.int64)
    {output}
"""

EXACT = "return page * {page_size} + positions % {page_size}"

PADDED = """slot_mapping = torch.full(({size},), {padding}, dtype=torch.int64, device=positions.device)
    slot_mapping[:num_tokens] = page * {page_size} + positions % {page_size}
    return slot_mapping"""

TABLE = ("max_num_reqs", "max_num_pages")


@family("slot_mapping", "_C::compute_slot_mapping_kernel_impl")
def cpu_slots(call: Invocation) -> KernelInstance:
    """The operator writes the slots of the tokens there are; the rest of its buffer stays."""
    tokens = len(call.tensor("positions"))
    output = EXACT.format(page_size=call.number("block_size"))
    slots = lazy_arg("int64", ("num_tokens",), lambda: call.tensor("slot_mapping")[:tokens])
    return slot_mapping_instance(call, "", "", output, {}, slots)


@family("slot_mapping", "triton::_compute_slot_mapping_kernel")
def triton_slots(call: Invocation) -> KernelInstance:
    """The kernel fills the rest of its buffer with padding. Its constants say whether ranks share a sequence."""
    if call["TOTAL_CP_WORLD_SIZE"] != 1 or not isinstance(call["PAD_ID"], int):
        raise Unrecognized("ranks share a sequence, or its constants are not known")
    size = call.number("max_num_tokens")
    output = PADDED.format(page_size=call.number("block_size"), size=size, padding=call["PAD_ID"])
    slots = lazy_arg("int64", ("max_num_tokens",), lambda: call.tensor("slot_mapping_ptr"))
    return slot_mapping_instance(call, "_ptr", f"_n{size}", output, {"max_num_tokens": int(size)}, slots)


def slot_mapping_instance(
    call: Invocation, suffix: str, word: str, output: str, axes: dict[str, int], slots: TensorArg
) -> KernelInstance:
    """`suffix` ends the names of the tensors; `slots` is the output that the source `output` computes."""
    starts, positions, table = (call.tensor(name + suffix) for name in ("query_start_loc", "positions", "block_table"))
    page_size = call.number("block_size")
    return KernelInstance(
        name=f"slot_mapping{word}_ps{page_size}",
        op_type="slot_mapping",
        axes={"num_tokens": None, "len_indptr": None, **dict.fromkeys(TABLE), "page_size": int(page_size), **axes},
        inputs={
            "query_start_loc": tensor_arg(starts, "len_indptr", description="Where each sequence's tokens begin."),
            "positions": tensor_arg(positions, "num_tokens", description="Each token's place in its sequence."),
            "block_table": tensor_arg(table, *TABLE, description="The pages of each sequence, in their order."),
        },
        outputs={"slot_mapping": slots},
        reference=REFERENCE.format(page_size=page_size, output=output),
        description="The slot of each token in the paged cache: page · page size + row.",
        constraints=("num_tokens == query_start_loc[-1].item()",),
        touched=lambda: (
            total_bytes(positions, starts) + 8 * len(positions)
        ),  # and of the table the entries of some pages
    )


@cost_function("slot_mapping")
def slot_mapping_cost(inputs: CostInputs) -> Cost:
    """Of the table, entries of some pages."""
    return inputs.cost(inputs.read("query_start_loc", "positions"))


@valid_input("slot_mapping")
def distinct_slots(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """A row of some page each, no two the same: two writes to one row have no defined result."""
    limit, size = draft.size(*PAGE_AXES), draft.size("page_size", "block_size")
    return draft.distinct(draft.shape(name)[0], limit * size) if limit and size else None


@replay_rule("_C::compute_slot_mapping_kernel_impl")
class SlotMapping(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "slot_mapping")


@replay_rule("triton::_compute_slot_mapping_kernel")
class TritonSlotMapping(ReplayRule):
    """Pages are only written down, so that any will do where no Sample holds the table."""

    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "slot_mapping_ptr", "block_table_ptr")

"""slot_mapping: where in the paged cache each token of a batch goes. vLLM's operators, in C++ and in Triton."""

from __future__ import annotations

from kcap.schemas.families import family
from kcap.schemas.families.form import Form, Slot, made, of
from kcap.schemas.families.invocation import Invocation, Unrecognized
from kcap.schemas.families.results import size

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
def cpu_slots(call: Invocation) -> Form:
    """The operator writes the slots of the tokens there are; the rest of its buffer stays."""
    tokens = len(call.tensor("positions"))
    output = EXACT.format(page_size=call.number("block_size"))
    slots = made("int64", ("num_tokens",), lambda: call.tensor("slot_mapping")[:tokens])
    return mapping(call, "", "", output, {}, slots)


@family("slot_mapping", "triton::_compute_slot_mapping_kernel")
def triton_slots(call: Invocation) -> Form:
    """The kernel fills the rest of its buffer with padding. Its constants tell whether ranks share a sequence."""
    if call["TOTAL_CP_WORLD_SIZE"] != 1 or not isinstance(call["PAD_ID"], int):
        raise Unrecognized("ranks share a sequence, or its constants are not known")
    size = call.number("max_num_tokens")
    output = PADDED.format(page_size=call.number("block_size"), size=size, padding=call["PAD_ID"])
    slots = made("int64", ("max_num_tokens",), lambda: call.tensor("slot_mapping_ptr"))
    return mapping(call, "_ptr", f"_n{size}", output, {"max_num_tokens": int(size)}, slots)


def mapping(call: Invocation, suffix: str, word: str, output: str, axes: dict[str, int], slots: Slot) -> Form:
    """`suffix` ends the names of the tensors; `slots` is the output that the text `output` makes."""
    starts, positions, table = (call.tensor(name + suffix) for name in ("query_start_loc", "positions", "block_table"))
    page_size = call.number("block_size")
    return Form(
        name=f"slot_mapping{word}_ps{page_size}",
        op_type="slot_mapping",
        axes={"num_tokens": None, "len_indptr": None, **dict.fromkeys(TABLE), **axes},
        inputs={
            "query_start_loc": of(starts, "len_indptr", description="Where each sequence's tokens begin."),
            "positions": of(positions, "num_tokens", description="Each token's place in its sequence."),
            "block_table": of(table, *TABLE, description="The pages of each sequence, in their order."),
        },
        outputs={"slot_mapping": slots},
        reference=REFERENCE.format(page_size=page_size, output=output),
        description="The slot of each token in the paged cache: page · page size + row.",
        constraints=("num_tokens == query_start_loc[-1].item()",),
        touched=lambda: size(positions, starts) + 8 * len(positions),  # and of the table the entries of some pages
    )

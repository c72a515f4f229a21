"""cache_zero: vLLM's Triton kernel that zeroes new blocks of its caches, to which it has only addresses.

0.22.1's, of which all blocks have one size. A segment is one cache, or its keys or values, in memory of its own; here
all are one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kcap.schemas.derive.bound_call import BoundCall, Inputs, Skip, table_of_addresses
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, rebuilt_argument, replay_rule, valid_input
from kcap.schemas.derive.invocation import Invocation, Unrecognized, has_strides, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, lazy_arg, packed_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft

REFERENCE = """import torch


@torch.no_grad()
def run(caches, block_ids):
    assert caches.shape[0] == {segments} and caches.shape[2] == {words}
    caches_out = caches.clone()
    caches_out[:, block_ids] = 0
    return caches_out
"""
CACHES = ("num_segments", "num_blocks", "block_words")
OPERATOR = "triton::_zero_kv_blocks_kernel"


@family("cache_zero", OPERATOR)
def zero_blocks(call: Invocation) -> KernelInstance:
    """`block_ids_ptr`: the blocks; `PAGE_SIZE_EL`: int32 of each; behind `seg_addrs_ptr` lie the caches."""
    call.refuse("seg_block_strides_ptr", "seg_page_sizes_ptr")
    ids, addresses = call.tensor("block_ids_ptr"), call.optional("seg_addrs_ptr")
    segments, words = int(call.number("N_SEGS")), int(call.number("PAGE_SIZE_EL"))
    if words < 1 or words % int(call.number("BLOCK_SIZE")) or call["n_blocks"] != len(ids) or not has_strides(ids, 1):
        raise Unrecognized("it zeroes parts of blocks, or some of them")
    if addresses is not None and len(addresses) != segments:  # a replay's come after its other arguments
        raise Unrecognized("it zeroes some of the caches")

    def caches() -> torch.Tensor:
        return call.weight("caches", (segments, len(ids) + 1, words), torch.int32)

    zeroed = 4 * segments * words * len(ids)
    return KernelInstance(
        name=f"cache_zero_s{segments}_w{words}",
        op_type="cache_zero",
        axes={"num_segments": segments, "num_blocks": None, "block_words": words, "num_zeroed": None},
        inputs={
            "caches": packed_arg(caches(), *CACHES, description="Caches, with what keys and values are as int32."),
            "block_ids": tensor_arg(ids, "num_zeroed", description="The blocks that are zeroed."),
        },
        outputs={"caches_out": lazy_arg("int32", CACHES, caches)},
        reference=REFERENCE.format(segments=segments, words=words),
        description="Blocks of all caches are zeroed.",
        touched=lambda: zeroed + total_bytes(ids),
    )


@cost_function("cache_zero")
def zero_cost(inputs: CostInputs) -> Cost:
    read, zeroed = inputs.read("block_ids"), len(inputs.index("block_ids").unique())
    segments, _, words = inputs["caches"].shape
    return Cost(read + 4 * segments * words * zeroed, read, 0, inputs.dtype)


@valid_input("block_ids", op_types=("cache_zero",))
def valid_blocks(draft: WorkloadDraft, name: str) -> torch.Tensor:
    return draft.distinct(draft.shape(name)[0], draft.shape("caches")[1])


@dataclass(frozen=True)
class HiddenCaches:
    """What no argument shows, by the name that the family has for it."""

    caches: torch.Tensor


@replay_rule(OPERATOR)
class ZeroBlocks(ReplayRule):
    """Caches of its own memory, of the blocks that are zeroed and one before them, which stays."""

    rebuilt_args = ("seg_addrs_ptr",)

    def prepare(self, bound: BoundCall) -> None:
        blocks = bound.spec("block_ids_ptr")
        if not isinstance(bound["PAGE_SIZE_EL"], int) or bound.content("block_ids_ptr") is None:
            raise Skip("its blocks, or their sizes, are not known")
        if bound["n_blocks"] != blocks.numel:
            raise Skip("it zeroes more blocks than it is given")
        bound.set_content("block_ids_ptr", torch.arange(blocks.numel) + 1)

    def extra_bytes(self, bound: BoundCall) -> int:
        blocks = bound.spec("block_ids_ptr").shape[0] + 1
        return 4 * bound.integer("N_SEGS") * blocks * bound.integer("PAGE_SIZE_EL")

    def rebuild_args(self, bound: BoundCall, inputs: Inputs) -> dict[str, Any]:
        blocks = rebuilt_argument(bound, inputs, "block_ids_ptr")
        shape = (bound.integer("N_SEGS"), len(blocks) + 1, bound.integer("PAGE_SIZE_EL"))
        hidden = HiddenCaches(torch.ones(shape, dtype=torch.int32, device=blocks.device))
        inputs.keep.append(hidden)
        return {"seg_addrs_ptr": table_of_addresses(hidden.caches, blocks.device)}

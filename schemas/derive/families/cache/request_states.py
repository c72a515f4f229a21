"""Replay rules of the kernels by which vLLM's V2 runner keeps its requests' states on the GPU; none is a family's.

Their indices are in the Samples. What else they have of integers is token ids, which are private and only copied, and
tables of addresses, which say nothing later and are made anew. Read in vllm/v1/worker/gpu of vLLM 0.32 and 0.33, its
files `block_table`, `buffer_utils` and `input_batch`.
"""

from __future__ import annotations

from typing import Any

import torch

from kcap.schemas.derive.bound_call import BoundCall, Inputs, Skip, table_of_addresses
from kcap.schemas.derive.families import ReplayRule, rebuilt_argument, replay_rule
from kcap.schemas.derive.index_arguments import set_zeros
from kcap.schemas.recording.values import TensorSpec


@replay_rule("triton::_prepare_prefill_inputs_kernel", "triton::_combine_sampled_and_draft_tokens_kernel")
class CopiedTokens(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "input_ids_ptr", "next_prefill_tokens_ptr", "all_token_ids_ptr")
        set_zeros(bound, "last_sampled_tokens_ptr", "draft_tokens_ptr", "logits_indices_ptr")


@replay_rule("triton::_post_update_kernel")
class PostUpdate(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        raise Skip("each run makes its requests a token longer: the next ones would write past their rows")


@replay_rule("triton::_apply_write_kernel")
class ApplyWrite(ReplayRule):
    """Each write goes to a row of its own from its first column on: of what was written the lengths are known alone."""

    def prepare(self, bound: BoundCall) -> None:
        if bound["MULTI_GROUP"]:
            raise Skip("it writes to several tables by their addresses")
        output, stride = bound.spec("output_ptr"), max(bound.integer("output_stride"), 1)
        rows = torch.arange(bound.spec("write_indices_ptr").numel)
        bound.set_content("write_indices_ptr", rows % max(output.numel // stride, 1))
        set_zeros(bound, "output_ptr", "write_starts_ptr", "write_contents_ptr")


def largest(bound: BoundCall, name: str) -> int:
    """The largest value of the integer tensor called `name`; -1 where it has none."""
    values = bound.content(name)
    return -1 if values is None or not values.numel() else int(values.max())


class AddressedTables(ReplayRule):
    """Block tables by their addresses, one for each group of caches: int32 [requests, pages of a request], as many of
    each as the strides say.
    """

    requests = ""  # the argument that names a table's rows

    def entries(self, bound: BoundCall, stride: int) -> int:
        """Of a table: as far as it is read, or written."""
        return self.rows(bound) * stride

    def rows(self, bound: BoundCall) -> int:
        return max(largest(bound, self.requests), 0) + 1

    def extra_bytes(self, bound: BoundCall) -> int:
        strides = bound.content("block_table_strides")
        sizes = [] if strides is None else [self.entries(bound, stride) for stride in strides.tolist()]
        return 4 * sum(sizes) * len(self.rebuilt_args)

    def rebuild_args(self, bound: BoundCall, inputs: Inputs) -> dict[str, Any]:
        strides = rebuilt_argument(bound, inputs, "block_table_strides")
        sizes, made = [self.entries(bound, stride) for stride in strides.tolist()], {}
        for name in self.rebuilt_args:
            tables = [torch.zeros(size, dtype=torch.int32, device=strides.device) for size in sizes]
            inputs.keep += tables
            made[name] = table_of_addresses(tables, strides.device)
        return made


@replay_rule("triton::_gather_block_tables_kernel")
class GatherBlockTables(AddressedTables):
    """A row of the table for each request of the batch; rows that pad a graph's batch are written, too."""

    rebuilt_args = ("src_block_table_ptrs", "dst_block_table_ptrs")
    requests = "batch_idx_to_req_idx"

    def rows(self, bound: BoundCall) -> int:
        return max(super().rows(bound), bound.spec("num_blocks_ptr").shape[-1])


@replay_rule("triton::_compute_slot_mappings_kernel")
class SlotMappings(AddressedTables):
    rebuilt_args = ("block_table_ptrs",)
    requests = "idx_mapping"

    def prepare(self, bound: BoundCall) -> None:
        """Groups of caches without slots, and ranks that share a sequence, are not told: all are mapped, and shared."""
        set_zeros(bound, "slot_mappings_ptr")
        for name in ("slot_mapping_enabled", "dcp_sharded"):
            if isinstance(flags := bound[name], TensorSpec):
                bound.set_content(name, torch.ones(flags.shape, dtype=torch.bool))

    def entries(self, bound: BoundCall, stride: int) -> int:
        """Also where a row is narrower than the positions that are looked up in it."""
        return super().entries(bound, stride) + largest(bound, "pos") + 1

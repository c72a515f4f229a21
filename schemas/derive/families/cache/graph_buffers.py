"""Replay rules of the kernels by which SGLang fills the buffers that its graphs read; none is a family's.

Their indices are in the Samples. What else they have of integers is only copied: token ids, which are private, and
tables of all requests. Read in sglang/kernels/ops of SGLang 0.5.23, its files `memory/small_copy` and
`mamba/mamba_state_indices_triton`.
"""

from __future__ import annotations

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.families import ReplayRule, replay_rule
from kcap.schemas.derive.index_arguments import set_zeros


@replay_rule("triton::_small_copy_kernel")
class SmallCopies(ReplayRule):
    """Lists of tensors, each copied into another by one launch."""

    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "sources", "destinations")


@replay_rule("triton::_fused_replay_state_indices_kernel")
class StateIndices(ReplayRule):
    """`mamba_map_ptr`: the state of each request, and where there is one `v2p_ptr`: where each state lies."""

    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "mamba_map_ptr", "v2p_ptr", "out_ptr")

"""Replay rules of mixtures of experts: expert ids below the number of experts. Read in vllm/_custom_ops.py (vLLM 0.22.1)."""

from __future__ import annotations

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.families import ReplayRule, replay_rule
from kcap.schemas.derive.index_arguments import set_indices_below, set_zeros


@replay_rule("_C::cpu_fused_moe")
class FusedMoe(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_indices_below(bound, "topk_id", bound.spec("w13").shape[0])


@replay_rule("_C::fused_experts_cpu")
class FusedExperts(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_indices_below(bound, "topk_ids", bound.spec("w1").shape[0])


@replay_rule("_moe_C::topk_softmax", "_moe_C::topk_sigmoid", "_moe_C::topk_softplus_sqrt")
class TopK(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "topk_indices", "token_expert_indices")


@replay_rule("_moe_C::moe_align_block_size")
class MoeAlign(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        experts = bound.integer("num_experts")
        set_indices_below(bound, "topk_ids", experts)
        set_zeros(bound, "sorted_token_ids", "experts_ids", "num_tokens_post_pad")
        if bound["maybe_expert_map"] is not None:
            set_indices_below(bound, "maybe_expert_map", experts)

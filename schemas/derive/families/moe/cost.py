"""Mixtures of experts: chosen experts' matrices, and two FLOPs for each number of theirs and each token of theirs."""

from __future__ import annotations

import torch

from kcap.schemas.derive.cost import Cost, CostInputs, distinct_bytes
from kcap.schemas.derive.families import cost_function
from kcap.schemas.derive.families.moe import fused


@cost_function("moe")
def moe_cost(given: CostInputs) -> Cost:
    """Where the kernel chooses the experts itself, only its logits are read for certain."""
    if "expert_outputs" in given:
        return given.whole()
    if "topk_ids" not in given:
        return given.cost(given.read("routing_logits"))
    matrices = [name for name in ("gemm1_weights", "gemm2_weights", "B") if name in given]
    if not matrices:
        return given.cost(given.read("topk_ids"))
    return experts_cost(given, given.index("topk_ids"), matrices)


def experts_cost(given: CostInputs, ids: torch.Tensor, matrices: list[str]) -> Cost:
    """`matrices`: [experts, …], each multiplied once for each token and each of its experts."""
    count = len(given[matrices[0]])
    one = [given[name][:1] for name in matrices]
    rows = given.read(*(name for name in ("hidden_states", "A", "topk_weights", "topk_ids") if name in given))
    read = rows + fused.experts_in_use(ids, count) * sum(map(distinct_bytes, one))
    return given.cost(read, 2 * fused.routed_pairs(ids, count) * sum(part.numel() for part in one))

"""Mixtures of experts: chosen experts' matrices, and two FLOPs for each number of theirs and each token of theirs."""

from __future__ import annotations

import torch

from kcap.replay.roofline.given import Given
from kcap.replay.roofline.kinds import kind
from kcap.schemas.families import moe
from kcap.schemas.families.cost import Cost, reach


@kind("moe")
def mixture(given: Given) -> Cost:
    """Where the kernel chooses the experts itself, only its logits are read for certain."""
    if "expert_outputs" in given:
        return given.whole()
    if "topk_ids" not in given:
        return given.cost(given.read("routing_logits"))
    matrices = [name for name in ("gemm1_weights", "gemm2_weights", "B") if name in given]
    if not matrices:
        return given.cost(given.read("topk_ids"))
    return experts(given, given.index("topk_ids"), matrices)


def experts(given: Given, ids: torch.Tensor, matrices: list[str]) -> Cost:
    """`matrices`: [experts, …], each multiplied once for each token and each of its experts."""
    count = len(given[matrices[0]])
    one = [given[name][:1] for name in matrices]
    rows = given.read(*(name for name in ("hidden_states", "A", "topk_weights", "topk_ids") if name in given))
    read = rows + moe.used(ids, count) * sum(map(reach, one))
    return given.cost(read, 2 * moe.chosen(ids, count) * sum(part.numel() for part in one))

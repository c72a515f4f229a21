"""Mixtures of experts: which experts a token goes to, with which weights."""

from __future__ import annotations

import torch

from kcap.schemas.derive.families import valid_input
from kcap.schemas.derive.workload_draft import WorkloadDraft

EXPERT_AXES = ("num_experts", "num_local_experts", "E")


@valid_input("topk_ids", "topk_idx", "topk_indices", "expert_ids", "expert_indices", op_types=("moe",))
def expert_ids(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """Experts of each token, no two the same; where the description says packed, a bfloat16 weight in the low half."""
    if (experts := draft.size(*EXPERT_AXES)) is None:
        return None
    shape = draft.shape(name)
    chosen = torch.rand((*shape[:-1], max(experts, shape[-1])), generator=draft.generator).argsort(dim=-1)
    chosen = chosen[..., : shape[-1]] % experts
    packed = "packed" in (draft.definition.inputs[name].description or "").lower()
    return chosen << 16 | _weights(draft, shape).bfloat16().view(torch.int16) if packed else chosen


@valid_input("topk_weights", "expert_weights", "routing_weights", op_types=("moe",))
def expert_weights(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Positive, of sum one for each token."""
    return _weights(draft, draft.shape(name))


def _weights(draft: WorkloadDraft, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.softmax(torch.randn(shape, generator=draft.generator), dim=-1)

"""Recurrent kernels (gated delta net, Mamba): values for which a state neither grows without end nor is shared."""

from __future__ import annotations

import torch

from kcap.schemas.derive.families import valid_input
from kcap.schemas.derive.workload_draft import WorkloadDraft


@valid_input("q", "k", op_types=("gdn",))
def unit_vectors(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Of length one, as in models: the delta rule multiplies the state by 1 - beta |k|^2 each step."""
    drawn = torch.randn(draft.shape(name), generator=draft.generator)
    return torch.nn.functional.normalize(drawn, dim=-1)


@valid_input("A", op_types=("mamba_ssu", "mamba"))
def decay(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Negative: the state decays by exp(A dt)."""
    return draft.reals(-8.0, -0.5, draft.shape(name))


@valid_input("*_indices", "cache_indices", "*_slots", op_types=("gdn", "mamba_ssu", "mamba"))
def state_indices(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """A state each, no two the same: each is written by its own sequence."""
    states = draft.size("pool_size", "state_cache_size", "num_states")
    return draft.distinct(draft.shape(name)[0], states) if states else None

"""Sampling: probabilities that sum to one, and the limits of what is sampled from them."""

from __future__ import annotations

import torch

from kcap.replay.definitions.draft import Draft
from kcap.replay.definitions.valid import rule

MOST_K = 100  # serving rarely asks for more


@rule("probs", "*_probs", "probabilities", op_types=("sampling",))
def probabilities(draft: Draft, name: str) -> torch.Tensor:
    return torch.softmax(torch.randn(draft.shape(name), generator=draft.generator), dim=-1)


@rule("top_k*", "topk", op_types=("sampling",))
def top_k(draft: Draft, name: str) -> torch.Tensor:
    """1 to 100 tokens, or the vocabulary."""
    return draft.integers(1, min(MOST_K, draft.size("vocab_size") or MOST_K) + 1, draft.shape(name))


@rule("top_p*", op_types=("sampling",))
def top_p(draft: Draft, name: str) -> torch.Tensor:
    return draft.reals(0.1, 1.0, draft.shape(name))


@rule("min_p*", op_types=("sampling",))
def min_p(draft: Draft, name: str) -> torch.Tensor:
    return draft.reals(0.0, 0.2, draft.shape(name))


@rule("temperature*", op_types=("sampling",))
def temperature(draft: Draft, name: str) -> torch.Tensor:
    return draft.reals(0.1, 2.0, draft.shape(name))


@rule("seed*", "philox_seed", "offset", "philox_offset", op_types=("sampling",))
def seeds(draft: Draft, name: str) -> torch.Tensor:
    return draft.integers(0, 1 << 31, draft.shape(name))

"""Groups of rows of a grouped product: where each ends, whose each row is, how many of each count."""

from __future__ import annotations

import torch

from kcap.replay.definitions.draft import Draft
from kcap.replay.definitions.valid import rule

GROUPED = ("grouped_gemm",)


@rule("group_ends", "offs", op_types=GROUPED)
def ends(draft: Draft, name: str) -> torch.Tensor | None:
    """Rising, the last one all rows; groups may be empty."""
    if (rows := draft.size("M")) is None:
        return None
    made = draft.integers(0, rows + 1, draft.shape(name)).sort().values
    made[-1:] = rows
    return made


@rule("group_ids", "m_indices", op_types=GROUPED)
def ids(draft: Draft, name: str) -> torch.Tensor | None:
    """The rows of a group lie together."""
    groups = draft.size("G")
    return draft.integers(0, groups, draft.shape(name)).sort().values if groups else None


@rule("masked_m", op_types=GROUPED)
def counts(draft: Draft, name: str) -> torch.Tensor | None:
    rows = draft.size("M")
    return None if rows is None else draft.integers(0, rows + 1, draft.shape(name))

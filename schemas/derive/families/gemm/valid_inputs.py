"""Groups of rows of a grouped product: where each ends, whose each row is, how many of each count."""

from __future__ import annotations

import torch

from kcap.schemas.derive.families import valid_input
from kcap.schemas.derive.workload_draft import WorkloadDraft

GROUPED_OP_TYPES = ("grouped_gemm",)


@valid_input("group_ends", "offs", op_types=GROUPED_OP_TYPES)
def group_ends(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """Rising, the last one all rows; groups may be empty."""
    if (rows := draft.size("M")) is None:
        return None
    made = draft.integers(0, rows + 1, draft.shape(name)).sort().values
    made[-1:] = rows
    return made


@valid_input("group_ids", "m_indices", op_types=GROUPED_OP_TYPES)
def group_ids(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """The rows of a group lie together."""
    groups = draft.size("G")
    return draft.integers(0, groups, draft.shape(name)).sort().values if groups else None


@valid_input("masked_m", op_types=GROUPED_OP_TYPES)
def group_counts(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    rows = draft.size("M")
    return None if rows is None else draft.integers(0, rows + 1, draft.shape(name))

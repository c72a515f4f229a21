"""Offsets of sequences within packed rows: `qo_indptr`, `kv_indptr`, `cu_seqlens`.

They rise from 0 to the total. Where queries and keys have offsets each, a sequence has at least as many keys as
queries, for a causal mask leaves nothing to the queries before.
"""

from __future__ import annotations

import torch

from kcap.replay.definitions import constraints
from kcap.replay.definitions.draft import Draft
from kcap.replay.definitions.valid import rule

KEYS = ("kv_indptr", "paged_kv_indptr", "cu_seqlens_k", "cu_seqlens_kv", "cu_seq_lens_k")
QUERIES = ("qo_indptr", "q_indptr", "cu_seqlens_q", "cu_seq_lens_q", "query_start_loc")
ROWS = {"kv_indptr": ("kv_indices", "k"), "qo_indptr": ("q", "q_nope"), "cu_seqlens_k": ("k",), "cu_seqlens_kv": ("k",)}


@rule("*indptr", "cu_seqlens*", "cu_seq_lens*", "query_start_loc")
def offsets(draft: Draft, name: str) -> torch.Tensor | None:
    if len(draft.axis_names(name)) != 1 or (last := total(draft, name)) is None:
        return None
    count = draft.shape(name)[0] - 1
    low, high = bounds(draft, name, count, last)
    return torch.cat([torch.zeros(1, dtype=torch.int64), split(draft, last, low, high).cumsum(0)])


def total(draft: Draft, name: str) -> int | None:
    """What the last offset is: the axis that a constraint names, else the first axis of what the offsets divide."""
    for text in draft.definition.constraints:
        match constraints.solved(text):
            case axis, other if other.replace(" ", "") in (f"{name}[-1].item()", f"{name}[-1]"):
                return draft.size(axis)
    rows = draft.first(*ROWS.get(name, ()), "q", "x", "hidden_states")
    return draft.shape(rows)[0] if rows else None


def bounds(draft: Draft, name: str, count: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the most rows of each of `count` sequences; at least one each where there are enough."""
    low, high = torch.full((count,), int(count <= last)), torch.full((count,), last)
    if name in QUERIES and (keys := draft.first(*KEYS)) and draft.shape(keys)[0] == count + 1:
        rows = draft[keys].diff().long().clamp(min=0) * (draft.size("page_size") or 1)
        high = rows if int(rows.sum()) >= last else high
    elif name in KEYS and (queries := draft.first(*QUERIES)) in draft.given and queries:
        pages = -(-draft[queries].diff().long().clamp(min=0) // (draft.size("page_size") or 1))
        low = pages if len(pages) == count and int(pages.sum()) <= last else low
    return torch.minimum(low, high), high


def split(draft: Draft, last: int, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """`last` rows in random parts between `low` and `high`, whose sums are at most and at least `last`."""
    spare, room = last - int(low.sum()), high - low
    weights = draft.reals(0.1, 1.0, low.shape).double()
    parts = torch.minimum((weights / weights.sum() * spare).long(), room)
    left = room - parts
    before = left.cumsum(0) - left
    return low + parts + torch.minimum((spare - int(parts.sum()) - before).clamp(min=0), left)

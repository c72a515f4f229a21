"""Valid inputs of attention: sequence offsets, the pages of each and how full the last is, masks that keep a key.

Offsets rise from 0 to the total. Where queries and keys each have offsets, a sequence has at least as many keys as
queries: under a causal mask, the queries before the first key would see nothing.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import torch

from kcap.errors import KcapError
from kcap.schemas.derive import constraints
from kcap.schemas.derive.families import trims_inputs, valid_input
from kcap.schemas.derive.families.attention.pages import starts_of
from kcap.schemas.derive.index_arguments import renumber_densely, renumber_slots
from kcap.schemas.derive.workload_draft import WorkloadDraft

KEY_OFFSETS = ("kv_indptr", "paged_kv_indptr", "cu_seqlens_k", "cu_seqlens_kv", "cu_seq_lens_k")
QUERY_OFFSETS = ("qo_indptr", "q_indptr", "cu_seqlens_q", "cu_seq_lens_q", "query_start_loc")

ROWS_DIVIDED = {
    "kv_indptr": ("kv_indices", "k"),
    "qo_indptr": ("q", "q_nope"),
    "cu_seqlens_k": ("k",),
    "cu_seqlens_kv": ("k",),
}


@valid_input("*indptr", "cu_seqlens*", "cu_seq_lens*", "query_start_loc")
def sequence_offsets(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    if len(draft.axis_names(name)) != 1 or (last := last_offset(draft, name)) is None:
        return None
    count = draft.shape(name)[0] - 1
    low, high = rows_per_sequence(draft, name, count, last)
    return starts_of(draft.parts(last, low, high))


def last_offset(draft: WorkloadDraft, name: str) -> int | None:
    """What the last offset is: the axis that a constraint names, else the first axis of what the offsets divide."""
    for text in draft.definition.constraints:
        match constraints.solved_axis(text):
            case axis, other if other.replace(" ", "") in (f"{name}[-1].item()", f"{name}[-1]"):
                return draft.size(axis)
    rows = draft.first(*ROWS_DIVIDED.get(name, ()), "q", "x", "hidden_states")
    return draft.shape(rows)[0] if rows else None


def rows_per_sequence(draft: WorkloadDraft, name: str, count: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the most rows of each of `count` sequences; at least one each where there are enough."""
    low, high = torch.full((count,), int(count <= last)), torch.full((count,), last)
    if name in QUERY_OFFSETS and (keys := draft.first(*KEY_OFFSETS)) and draft.shape(keys)[0] == count + 1:
        rows = draft[keys].diff().long().clamp(min=0) * (draft.size("page_size") or 1)
        high = rows if int(rows.sum()) >= last else high
    elif name in KEY_OFFSETS and (queries := draft.first(*QUERY_OFFSETS)) in draft.given and queries:
        pages = -(-draft[queries].diff().long().clamp(min=0) // (draft.size("page_size") or 1))
        low = pages if len(pages) == count and int(pages.sum()) <= last else low
    return torch.minimum(low, high), high


PAGE_TABLES = ("block_table*", "page_table*", "slot_mapping")
PAGE_AXES = ("num_pages", "num_blocks", "num_kv_blocks")  # the axis of all pages
PAGE_INDICES = ("kv_indices", "paged_kv_indices")  # a page each
PADDED_SHARE = 1 / 8  # of sequences
ZERO_IS_PADDING = re.compile(r"\b0: [^.;]*padding")
SLOT_INDICES = ("sparse_indices",)  # page x page size + row each, -1: none


@valid_input(*PAGE_INDICES)
def page_indices(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """Pages in random order; none is shared where there are enough."""
    limit = draft.size(*PAGE_AXES)
    return draft.distinct(draft.shape(name)[0], limit) if limit else None


@valid_input(*PAGE_TABLES[:2])
def block_table(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """A page in every cell, used or not; of a cache that is no input, as many as there are cells."""
    rows, columns = draft.shape(name)
    return draft.distinct(rows * columns, draft.size(*PAGE_AXES) or rows * columns)


@valid_input("*last_page_len*")
def last_page_len(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """1 to page_size rows; where queries have offsets, enough for those that the other pages do not hold."""
    keys, queries, size = draft.first(*KEY_OFFSETS), draft.first(*QUERY_OFFSETS), draft.size("page_size")
    if size is None:
        return None
    low = torch.ones(draft.shape(name), dtype=torch.int64)
    if keys and queries:
        short = draft[queries].diff().long() - (draft[keys].diff().long() - 1) * size
        low[: len(short)] = short.clamp(1, size)[: len(low)]
    return low + (draft.reals(0, 1, low.shape) * (size - low + 1)).long().clamp(max=size - 1).minimum(size - low)


@valid_input("seq_lens*", "seqlens*", "context_lens", "cache_seqlens", "seq_len_kv")
def sequence_lengths(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """1 to as many rows as the block table's pages hold; where the description says that 0 is padding, 0 in an eighth
    of those after the first.
    """
    table, size = draft.first("block_table", "block_tables", "page_table"), draft.size("page_size", "block_size")
    most = draft.shape(table)[1] * (size or 1) if table else draft.size("max_seq_len", "total_kv")
    if not most:
        return None
    lengths = draft.integers(1, most + 1, draft.shape(name))
    if lengths.dim() and ZERO_IS_PADDING.search(draft.definition.inputs[name].description or ""):
        lengths[1:][draft.reals(0.0, 1.0, lengths[1:].shape) < PADDED_SHARE] = 0
    return lengths


@valid_input(*SLOT_INDICES)
def sparse_indices(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """Distinct rows of the cache for each token; what exceeds the cache is -1."""
    limit, size = draft.size(*PAGE_AXES), draft.size("page_size", "block_size")
    if not limit or not size:
        return None
    tokens, topk = draft.shape(name)
    slots = torch.full((tokens, topk), -1, dtype=torch.int64)
    for row in slots:
        row[: limit * size] = draft.distinct(min(topk, limit * size), limit * size)
    return slots


@trims_inputs
def pages_in_use(draft: WorkloadDraft) -> None:
    """Cut the caches to the pages that the one index input names, renumbered in their order: no other page is read."""
    indices = [name for name in (*PAGE_INDICES, *SLOT_INDICES) if name in draft]
    axis = next((name for name in PAGE_AXES if name in draft.axes), None)
    if axis is None or len(indices) != 1 or _names_pages_otherwise(draft, axis):
        return
    name = indices[0]
    store = draft.given if name in draft.given else draft.made
    dense, used = _renumbered(draft, name)
    if used < draft.axes[axis]:
        draft.changes.append(f"caches cut to the pages in use: {axis} is {used} of {draft.axes[axis]}")
        store[name], draft.axes[axis] = dense.to(draft[name].dtype), used


def _renumbered(draft: WorkloadDraft, name: str) -> tuple[torch.Tensor, int]:
    values, limit, size = draft[name], draft.size(*PAGE_AXES) or 0, 1
    if name in SLOT_INDICES:
        size = draft.size("page_size", "block_size") or 1
    if values.numel() and int(values.max()) >= limit * size:
        raise KcapError(f"{name}: names page {int(values.max()) // size}, the cache has {limit}: mend the dataset")
    return renumber_slots(values, size) if name in SLOT_INDICES else renumber_densely(values)


def _names_pages_otherwise(draft: WorkloadDraft, axis: str) -> bool:
    """Whether the axis of pages is more than the first of caches, or another input names pages, too."""
    inputs = draft.definition.inputs
    shapes = [tensor.shape or [] for tensor in inputs.values()]
    return any(axis in shape[1:] for shape in shapes) or any(fnmatchcase(n, t) for n in inputs for t in PAGE_TABLES)


@valid_input("alibi_slopes")
def alibi_slopes(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Between those of the first and of the last head of eight (ALiBi, arXiv:2108.12409)."""
    return torch.exp2(-draft.reals(1.0, 8.0, draft.shape(name)))


@valid_input("mask", "*_mask")
def mask(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    return kept_keys(draft, name) if draft.definition.inputs[name].dtype == "bool" else None


def kept_keys(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Random, but True for the first key of each row: an empty row has no softmax."""
    kept = draft.reals(0, 1, draft.shape(name)) < 0.5
    if kept.numel():
        kept[..., 0] = True
    return kept

"""Paged caches: which pages a sequence has, how full the last one is, and the cache cut to the pages in use."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch

from kcap.errors import KcapError
from kcap.replay.definitions.draft import Draft
from kcap.replay.definitions.valid import cut, rule
from kcap.replay.definitions.valid.offsets import KEYS, QUERIES
from kcap.replay.rules.paging import renumber, renumber_slots

TABLES = ("block_table*", "page_table*", "slot_mapping")
PAGES = ("num_pages", "num_blocks", "num_kv_blocks")  # the axis of all pages
INDICES = ("kv_indices", "paged_kv_indices")  # a page each
SLOTS = ("sparse_indices",)  # page x page size + row each, -1: none


@rule(*INDICES)
def pages(draft: Draft, name: str) -> torch.Tensor | None:
    """Pages in random order; none is shared where there are enough."""
    limit = draft.size(*PAGES)
    return draft.distinct(draft.shape(name)[0], limit) if limit else None


@rule(*TABLES[:2])
def block_table(draft: Draft, name: str) -> torch.Tensor:
    """A page in every cell, used or not; of a cache that is no input, as many as there are cells."""
    rows, columns = draft.shape(name)
    return draft.distinct(rows * columns, draft.size(*PAGES) or rows * columns)


@rule("*last_page_len*")
def last_page_len(draft: Draft, name: str) -> torch.Tensor | None:
    """1 to page_size rows; where queries have offsets, enough for those that the other pages do not hold."""
    keys, queries, size = draft.first(*KEYS), draft.first(*QUERIES), draft.size("page_size")
    if size is None:
        return None
    low = torch.ones(draft.shape(name), dtype=torch.int64)
    if keys and queries:
        short = draft[queries].diff().long() - (draft[keys].diff().long() - 1) * size
        low[: len(short)] = short.clamp(1, size)[: len(low)]
    return low + (draft.reals(0, 1, low.shape) * (size - low + 1)).long().clamp(max=size - 1).minimum(size - low)


@rule("seq_lens*", "seqlens*", "context_lens", "cache_seqlens", "seq_len_kv")
def sequence_lengths(draft: Draft, name: str) -> torch.Tensor | None:
    """1 to as many rows as the block table's pages hold."""
    table, size = draft.first("block_table", "block_tables", "page_table"), draft.size("page_size", "block_size")
    most = draft.shape(table)[1] * (size or 1) if table else draft.size("max_seq_len", "total_kv")
    return draft.integers(1, most + 1, draft.shape(name)) if most else None


@rule("slot_mapping")
def slot_mapping(draft: Draft, name: str) -> torch.Tensor | None:
    """A row of some page each, no two the same: two writes to one row have no defined result."""
    limit, size = draft.size(*PAGES), draft.size("page_size", "block_size")
    return draft.distinct(draft.shape(name)[0], limit * size) if limit and size else None


@rule(*SLOTS)
def sparse_indices(draft: Draft, name: str) -> torch.Tensor | None:
    """Distinct rows of the cache for each token; what exceeds the cache is -1."""
    limit, size = draft.size(*PAGES), draft.size("page_size", "block_size")
    if not limit or not size:
        return None
    tokens, topk = draft.shape(name)
    made = torch.full((tokens, topk), -1, dtype=torch.int64)
    for row in made:
        row[: limit * size] = draft.distinct(min(topk, limit * size), limit * size)
    return made


@cut
def pages_in_use(draft: Draft) -> None:
    """Cut the caches to the pages that the one index input names, renumbered in their order: no other page is read."""
    indices = [name for name in (*INDICES, *SLOTS) if name in draft]
    axis = next((name for name in PAGES if name in draft.axes), None)
    if axis is None or len(indices) != 1 or _names_pages_otherwise(draft, axis):
        return
    name = indices[0]
    store = draft.given if name in draft.given else draft.made
    dense, used = _dense(draft, name)
    if used < draft.axes[axis]:
        draft.changes.append(f"caches cut to the pages in use: {axis} is {used} of {draft.axes[axis]}")
        store[name], draft.axes[axis] = dense.to(draft[name].dtype), used


def _dense(draft: Draft, name: str) -> tuple[torch.Tensor, int]:
    values, limit, size = draft[name], draft.size(*PAGES) or 0, 1
    if name in SLOTS:
        size = draft.size("page_size", "block_size") or 1
    if values.numel() and int(values.max()) >= limit * size:
        raise KcapError(f"{name}: names page {int(values.max()) // size}, the cache has {limit}: mend the dataset")
    return renumber_slots(values, size) if name in SLOTS else renumber(values)


def _names_pages_otherwise(draft: Draft, axis: str) -> bool:
    """Whether the axis of pages is more than the first of caches, or another input names pages, too."""
    inputs = draft.definition.inputs
    shapes = [tensor.shape or [] for tensor in inputs.values()]
    return any(axis in shape[1:] for shape in shapes) or any(fnmatchcase(n, t) for n in inputs for t in TABLES)

"""Attention over a paged cache, or over keys and values as they are: pairs that queries see, rows of pages in use.

Taken for causal, which is the least: a Definition's fields do not say it. A window is known from the name.
"""

from __future__ import annotations

import re

import torch

from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import cost_function
from kcap.schemas.derive.families.attention.core import attended_pairs, first_key_seen
from kcap.schemas.derive.families.attention.pages import Pages


@cost_function("gqa_paged")
def gqa_paged_cost(given: CostInputs) -> Cost:
    """q: [tokens, heads, dim], k_cache, v_cache: [pages, rows of a page, kv heads, dim]."""
    k, v = given["k_cache"], given["v_cache"]
    row = k.shape[2] * (k.shape[3] * k.element_size() + v.shape[3] * v.element_size())
    return paged_cost(given, k.shape[1], ["q"], row, k.shape[3] + v.shape[3])


@cost_function("mla_paged")
def mla_paged_cost(given: CostInputs) -> Cost:
    """q_nope, q_pe: [tokens, heads, dim], ckv_cache, kpe_cache: [pages, rows of a page, dim]; a latent is both."""
    ckv, kpe = given["ckv_cache"], given["kpe_cache"]
    row = ckv.shape[2] * ckv.element_size() + kpe.shape[2] * kpe.element_size()
    return paged_cost(given, ckv.shape[1], ["q_nope", "q_pe"], row, 2 * ckv.shape[2] + kpe.shape[2])


def paged_cost(given: CostInputs, page_size: int, queries: list[str], row: int, dims: int) -> Cost:
    """`row`: bytes of a token's row in the caches; `dims`: numbers multiplied for a pair of query and key and head."""
    window, pages = window_of(given), pages_of(given, page_size)
    lengths, first = pages.lengths(), given[queries[0]]
    counts = given.index("qo_indptr").diff() if "qo_indptr" in given else (lengths > 0).long()
    tokens = int(counts.sum())
    read = pages.rows(counts, window) * row
    read += sum(tokens * given[name][:1].numel() * given[name].element_size() for name in queries)
    return given.cost(read, 2 * first.shape[1] * dims * attended_pairs(lengths, counts, True, window))


@cost_function("gqa_ragged", "mla_ragged")
def ragged_cost(given: CostInputs) -> Cost:
    """q: [tokens, heads, dim], k, v: [keys, kv heads, dim]."""
    q, k, v, window = given["q"], given["k"], given["v"], window_of(given)
    queries, keys = given.index("qo_indptr").diff(), given.index("kv_indptr").diff()
    rows = int((keys - first_key_seen(keys, queries, window)).sum())
    row = k[:1].numel() * k.element_size() + v[:1].numel() * v.element_size()
    flops = 2 * q.shape[1] * (q.shape[2] + v.shape[2]) * attended_pairs(keys, queries, True, window)
    return given.cost(rows * row + given.read("q"), flops)


def pages_of(given: CostInputs, page_size: int) -> Pages:
    """Where it is not said how long a sequence's last page is, it has one row."""
    starts, indices = given.index("kv_indptr"), given.index("kv_indices")
    used = (starts.diff() > 0).long()
    last = given.index("kv_last_page_len") * used if "kv_last_page_len" in given else used
    return Pages(lambda: starts, lambda: _used(starts, indices), lambda: last, page_size)


def _used(starts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return indices[int(starts[0]) : int(starts[-1])]


def window_of(given: CostInputs) -> int:
    """Keys before its own that a query sees, -1: all; LookupError for one that only the reference knows."""
    found = re.search(r"_window(\d+)", given.definition.name)
    if not found and "window" in given.definition.reference:
        raise LookupError("a window of unknown size")
    return int(found[1]) if found else -1

"""Attention over a paged cache, or over keys and values as they are: pairs that queries see, rows of pages in use.

Attention is taken to be causal, which costs least, because no field of a Definition says it. A window is read from the
Definition's name.
"""

from __future__ import annotations

import re

import torch

from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import cost_function
from kcap.schemas.derive.families.attention.core import attended_pairs, first_key_seen
from kcap.schemas.derive.families.attention.pages import Pages, table_pages
from kcap.schemas.derive.invocation import total_bytes


@cost_function("gqa_paged")
def gqa_paged_cost(inputs: CostInputs) -> Cost:
    """q: [tokens, heads, dim], k_cache, v_cache: [pages, rows of a page, kv heads, dim]."""
    k, v = inputs["k_cache"], inputs["v_cache"]
    row = k.shape[2] * (k.shape[3] * k.element_size() + v.shape[3] * v.element_size())
    return paged_cost(inputs, k.shape[1], ["q"], row, k.shape[3] + v.shape[3])


@cost_function("mla_paged")
def mla_paged_cost(inputs: CostInputs) -> Cost:
    """q_nope, q_pe: [tokens, heads, dim], ckv_cache, kpe_cache: [pages, rows of a page, dim]; a latent is both."""
    ckv, kpe = inputs["ckv_cache"], inputs["kpe_cache"]
    row = ckv.shape[2] * ckv.element_size() + kpe.shape[2] * kpe.element_size()
    return paged_cost(inputs, ckv.shape[1], ["q_nope", "q_pe"], row, 2 * ckv.shape[2] + kpe.shape[2])


def paged_cost(inputs: CostInputs, page_size: int, queries: list[str], row: int, dims: int) -> Cost:
    """`row`: bytes of a token's row in the caches; `dims`: numbers multiplied for a pair of query and key and head."""
    window, pages = window_of(inputs), pages_of(inputs, page_size)
    lengths, first = pages.lengths(), inputs[queries[0]]
    counts = inputs.index("qo_indptr").diff() if "qo_indptr" in inputs else (lengths > 0).long()
    tokens = int(counts.sum())
    read = pages.rows(counts, window) * row
    read += sum(tokens * inputs[name][:1].numel() * inputs[name].element_size() for name in queries)
    return inputs.cost(
        read + read_of_sinks(inputs), 2 * first.shape[1] * dims * attended_pairs(lengths, counts, True, window)
    )


@cost_function("gqa_ragged", "mla_ragged")
def ragged_cost(inputs: CostInputs) -> Cost:
    """q: [tokens, heads, dim], k, v: [keys, kv heads, dim]."""
    q, k, v, window = inputs["q"], inputs["k"], inputs["v"], window_of(inputs)
    queries, keys = inputs.index("qo_indptr").diff(), inputs.index("kv_indptr").diff()
    rows = int((keys - first_key_seen(keys, queries, window)).sum())
    row = k[:1].numel() * k.element_size() + v[:1].numel() * v.element_size()
    flops = 2 * q.shape[1] * (q.shape[2] + v.shape[2]) * attended_pairs(keys, queries, True, window)
    return inputs.cost(rows * row + inputs.read("q") + read_of_sinks(inputs), flops)


@cost_function("attention_extend")
def extend_cost(inputs: CostInputs) -> Cost:
    """q: [tokens, heads, dim], k, v: [tokens, kv heads, dim], caches: [slots, 1, kv heads, dim]."""
    q, v, window = inputs["q"], inputs["v"], window_of(inputs)
    pages, queries = pages_of(inputs, 1), inputs.index("qo_indptr").diff()
    pairs = attended_pairs(pages.lengths() + queries, queries, True, window)
    cached = cached_bytes(pages, inputs["k_cache"], inputs["v_cache"])
    read = inputs.read("q", "k", "v") + cached + read_of_sinks(inputs)
    return inputs.cost(read, 2 * q.shape[1] * (q.shape[2] + v.shape[2]) * pairs)


def cached_bytes(pages: Pages, k: torch.Tensor, v: torch.Tensor) -> int:
    """All rows of `pages`, once each; caches: [pages, rows of a page, kv heads, dim], values of another size than the
    keys are a part of them."""
    rows = pages.rows((pages.lengths() > 0).long())
    return rows * total_bytes(k[:1, :1], *([v[:1, :1]] if v.shape[-1] == k.shape[-1] else []))


def read_of_sinks(inputs: CostInputs) -> int:
    return inputs.read("sinks") if "sinks" in inputs else 0


def pages_of(inputs: CostInputs, page_size: int) -> Pages:
    """A last page of unknown length counts as one row."""
    if "block_table" in inputs:
        return table_pages(inputs.index("block_table"), inputs.index("seq_lens"), page_size)
    starts, indices = inputs.index("kv_indptr"), inputs.index("kv_indices")
    used = (starts.diff() > 0).long()
    last = inputs.index("kv_last_page_len") * used if "kv_last_page_len" in inputs else used
    return Pages(lambda: starts, lambda: indices[int(starts[0]) : int(starts[-1])], lambda: last, page_size)


def window_of(inputs: CostInputs) -> int:
    """Keys before its own that a query sees, -1: all; LookupError for one that only the reference knows."""
    match = re.search(r"_window(\d+)", inputs.definition.name)
    if not match and "window" in inputs.definition.reference:
        raise LookupError("a window of unknown size")
    return int(match[1]) if match else -1

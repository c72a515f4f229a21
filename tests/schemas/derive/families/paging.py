"""Batches over paged caches, drawn: each sequence has pages of its own, in no order."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """`queries`, `lengths`: tokens of each sequence, new and in all. `table`: int32 [sequences, most pages + 1]."""

    queries: list[int]
    lengths: list[int]
    table: torch.Tensor
    pages: int

    @property
    def tokens(self) -> int:
        return sum(self.queries)

    @property
    def starts(self) -> torch.Tensor:
        return starts(self.queries)

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32)


def starts(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def batch(queries: list[int], lengths: list[int], page_size: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=generator, dtype=torch.int32)
    table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = order[sum(counts[:row]) : sum(counts[:row]) + count]
    return Batch(queries, lengths, table, len(order))


def tokens_of(cache: torch.Tensor, requests: Batch, row: int) -> torch.Tensor:
    """The tokens of a sequence in a cache [pages, rows of a page, …]."""
    return cache[requests.table[row].long()].flatten(0, 1)[: requests.lengths[row]]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, window: int = -1, right: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's own attention of one sequence, [tokens, heads, dim], and its natural log-sum-exp, [heads, tokens]."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    far = torch.arange(m)[None, :] - torch.arange(n)[:, None] - (m - n)
    seen = (far <= 0 if causal else torch.ones_like(far, dtype=torch.bool)) & ((far >= -window) | (window < 0))
    seen &= (far <= right) | (right < 0)
    heads = [x.float().transpose(0, 1)[None] for x in (q, k, v)]
    attended = torch.nn.functional.scaled_dot_product_attention(*heads, seen, scale=scale, enable_gqa=True)
    logits = heads[0][0] @ heads[1][0].repeat_interleave(group, 0).mT * scale
    lse = logits.masked_fill(~seen, -float("inf")).logsumexp(-1)
    return attended[0].transpose(0, 1).to(q.dtype), lse


def share_of_keys(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """What sinks [heads] leave of the softmax to the keys, [tokens, heads, 1]; `lse`: natural, [heads, tokens]."""
    return torch.sigmoid(lse - sinks.float()[:, None]).T[..., None]

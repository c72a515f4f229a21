"""Paged key-value caches at the pages in use.

The pages that a Sample's block table or slots name are renumbered densely, in their order: page 7, 9 and 40 become
0, 1 and 2. Page and row strides stay, so each page is read as it was; only the distance between pages shrinks.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kcap.replay.bind import Bound
from kcap.replay.skip import Skip
from kcap.schemas.values import TensorSpec


def renumber(pages: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`pages` with dense numbers in the same order, and how many there are. Negative entries stay as they are."""
    used, dense = torch.unique(pages, sorted=True, return_inverse=True)
    negative = int((used < 0).sum())
    return torch.where(pages < 0, pages, (dense - negative).to(pages.dtype)), max(len(used) - negative, 1)


def renumber_slots(slots: torch.Tensor, page_size: int) -> tuple[torch.Tensor, int]:
    """Slots (page x page size + row) on dense pages; a slot of -1 is padding."""
    pages, count = renumber(torch.where(slots < 0, -1, slots // page_size))
    return torch.where(slots < 0, slots, pages * page_size + slots % page_size), count


def table_in_use(table: torch.Tensor, lengths: torch.Tensor, page_size: int) -> torch.Tensor:
    """The block table, a row for each length, with every entry that no sequence reaches set to its row's first page."""
    table = torch.nn.functional.pad(table[: len(lengths)], (0, 0, 0, max(len(lengths) - len(table), 0)))
    pages = (lengths.long().clamp(min=0) + page_size - 1) // page_size
    if int(pages.max()) > table.shape[1]:
        raise Skip(f"a sequence of {int(lengths.max())} tokens does not fit its {table.shape[1]} recorded pages")
    reached = torch.arange(table.shape[1])[None, :] < pages[:, None]
    return torch.where(reached, table, table[:, :1])


def shrink(bound: Bound, names: tuple[str, ...], pages: int) -> None:
    """Cut the caches called `names` (pages in dimension 0) down to `pages`; those sharing a storage still share it."""
    specs = {name: bound.spec(name) for name in names if isinstance(bound[name], TensorSpec)}
    for name, spec in specs.items():
        if spec.shape[0] < pages:
            raise Skip(f"its {pages} pages do not fit '{name}', which has {spec.shape[0]}")
        first = min(other.offset or 0 for other in specs.values() if other.storage == spec.storage)
        offset = _moved(spec, (spec.offset or 0) - first, pages)
        strides = spec.effective_strides
        bound.set_value(name, replace(spec, shape=(pages, *spec.shape[1:]), strides=strides, offset=offset))


def _moved(spec: TensorSpec, offset: int, pages: int) -> int:
    """The offset, from its storage's first cache, once each block of all pages holds only `pages` of them."""
    stride = spec.effective_strides[0]
    whole, rest = divmod(offset, max(spec.shape[0] * stride, 1))
    return whole * pages * stride + rest

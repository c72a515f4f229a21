"""Index arguments of a Call, renumbered densely and kept in range, and the tables that they point into, cut to match.

The pages that a Sample's block table or slots name are renumbered in their order: page 7, 9 and 40 become 0, 1 and 2.
Page and row strides stay, so each page is read as it was; only the distance between pages shrinks.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.recording.values import TensorSpec


def renumber_densely(pages: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`pages` with dense numbers in the same order, and how many there are. Negative entries stay as they are."""
    used, dense = torch.unique(pages, sorted=True, return_inverse=True)
    negative = int((used < 0).sum())
    return torch.where(pages < 0, pages, (dense - negative).to(pages.dtype)), max(len(used) - negative, 1)


def renumber_slots(slots: torch.Tensor, page_size: int) -> tuple[torch.Tensor, int]:
    """Slots (page x page size + row) on dense pages; a slot of -1 is padding."""
    pages, count = renumber_densely(torch.where(slots < 0, -1, slots // page_size))
    return torch.where(slots < 0, slots, pages * page_size + slots % page_size), count


def table_in_use(table: torch.Tensor, lengths: torch.Tensor, page_size: int) -> torch.Tensor:
    """The block table, a row for each length, with every entry that no sequence reaches set to its row's first page."""
    table = torch.nn.functional.pad(table[: len(lengths)], (0, 0, 0, max(len(lengths) - len(table), 0)))
    pages = (lengths.long().clamp(min=0) + page_size - 1) // page_size
    if int(pages.max()) > table.shape[1]:
        raise Skip(f"a sequence of {int(lengths.max())} tokens does not fit its {table.shape[1]} recorded pages")
    reached = torch.arange(table.shape[1])[None, :] < pages[:, None]
    return torch.where(reached, table, table[:, :1])


def shrink_caches(bound: BoundCall, names: tuple[str, ...], pages: int) -> None:
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


def cut_to_rows_in_use(bound: BoundCall, table: str, indices: str) -> None:
    """Cut `table` (rows in dimension 0) down to the rows that `indices` name, renumbered densely in their order.

    This lets sets of inputs rotate: copies of a whole vocabulary would not fit, and one copy would stay in the cache.
    Indices that were not recorded are drawn.
    """
    spec, index_spec = bound.spec(table), bound.spec(indices)
    size = spec.shape[0]
    if not index_spec.numel or not size:
        return
    values = bound.content(indices)
    if values is None:
        low, high = bound.range_of(indices, (0, size - 1))
        low = min(max(low, 0), size - 1)
        values = torch.randint(low, max(low, min(high, size - 1)) + 1, index_spec.shape)
    elif int(values.min()) < 0 or int(values.max()) >= size:
        return  # the operator itself reports an index out of range
    dense, rows = renumber_densely(values)
    bound.set_content(indices, dense)
    bound.set_value(table, replace(spec, shape=(rows, *spec.shape[1:]), strides=spec.effective_strides))


def bytes_without_unread_rows(total: int, table: TensorSpec, rows: int, dim: int) -> int:
    """`total` bytes less what `rows` lookups in dimension `dim` leave of `table`."""
    unread = max(table.shape[dim] - rows, 0) / max(table.shape[dim], 1)
    return total - int(unread * table.numel * table.bits / 8)


def set_indices_below(bound: BoundCall, name: str, limit: int) -> None:
    """Make sure that the integer tensor `name` holds values in [0, limit), drawing them if none were recorded."""
    spec = bound[name]
    if not isinstance(spec, TensorSpec):
        return
    values = bound.content(name)
    content = torch.randint(0, max(limit, 1), spec.shape) if values is None else values.clamp(0, max(limit - 1, 0))
    bound.set_content(name, content)


def set_zeros(bound: BoundCall, *names: str) -> None:
    """Integer tensors, or lists of them, that the operator only writes, or only copies."""
    for path, spec in bound.tensors():
        if bound.holder(path).name in names:
            bound.contents.setdefault(path, torch.zeros(spec.shape, dtype=torch.int64))


def random_parts(
    total: int, low: torch.Tensor, high: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    """`total` in random parts between `low` and `high`, or as near to it as these come: int64, in their shape, [n]."""
    room = high - low
    spare = min(max(total - int(low.sum()), 0), int(room.sum()))
    weights = (torch.rand(low.shape, generator=generator) * 0.9 + 0.1).double()
    parts = torch.minimum((weights / weights.sum() * spare).long(), room)
    order = torch.randperm(len(parts), generator=generator)  # in which the rest is handed out
    left = (room - parts)[order]
    before = left.cumsum(0) - left
    parts[order] += torch.minimum((spare - int(parts.sum()) - before).clamp(min=0), left)
    return low + parts

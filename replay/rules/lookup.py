"""Rules for lookups: of a large table they read the rows that the indices name, and no more."""

from __future__ import annotations

from dataclasses import replace

import torch

from kcap.replay.bind import Bound
from kcap.replay.rules import Rule, rule
from kcap.replay.rules.paging import renumber
from kcap.schemas.values import TensorSpec


def rows_in_use(bound: Bound, table: str, indices: str) -> None:
    """Cut `table` (rows in dimension 0) down to the rows that `indices` name, renumbered densely in their order.

    So that sets of inputs can rotate: copies of a whole vocabulary would not fit, and one copy stays in the cache.
    Indices that were not recorded are drawn.
    """
    spec, places = bound.spec(table), bound.spec(indices)
    size = spec.shape[0]
    if not places.numel or not size:
        return
    known = bound.content(indices)
    if known is None:
        low, high = bound.ranges.get(str(bound.index(indices)), (0, size - 1))
        low = min(max(low, 0), size - 1)
        known = torch.randint(low, max(low, min(high, size - 1)) + 1, places.shape)
    elif int(known.min()) < 0 or int(known.max()) >= size:
        return  # the operator shall say so
    dense, rows = renumber(known)
    bound.set_content(indices, dense)
    bound.set_value(table, replace(spec, shape=(rows, *spec.shape[1:]), strides=spec.effective_strides))


def without(total: int, table: TensorSpec, rows: int, dim: int) -> int:
    """`total` bytes less what `rows` lookups in dimension `dim` leave of `table`."""
    unread = max(table.shape[dim] - rows, 0) / max(table.shape[dim], 1)
    return total - int(unread * table.numel * table.bits / 8)


@rule("aten::embedding")
class Embedding(Rule):
    def cut(self, bound: Bound) -> None:
        rows_in_use(bound, "weight", "indices")


@rule("aten::index_select", "aten::index_select.out")
class IndexSelect(Rule):
    def touched(self, bound: Bound, total: int) -> int:
        table = bound.spec("self")
        return without(total, table, bound.spec("index").numel, bound.integer("dim")) if table.shape else total


@rule("aten::index.Tensor")
class Index(Rule):
    """Only one index tensor, in the first dimension: the rest is counted whole."""

    def touched(self, bound: Bound, total: int) -> int:
        match bound["indices"]:
            case [TensorSpec(dtype="int32" | "int64") as index]:
                return without(total, bound.spec("self"), index.numel, 0)
        return total

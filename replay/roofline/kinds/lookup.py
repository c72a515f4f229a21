"""Kernels that read rows of a table, or write rows of a cache: the rows alone count."""

from __future__ import annotations

from kcap.replay.roofline.given import Given
from kcap.replay.roofline.kinds import kind
from kcap.schemas.families.cost import Cost, reach


@kind("embedding")
def embedding(given: Given) -> Cost:
    rows = len(given.index("input_ids").unique())
    return given.cost(rows * reach(given["weight"][:1]) + given.read("input_ids"))


@kind("rope")
def rope(given: Given) -> Cost:
    rows = len(given.index("positions").unique())
    read = given.read(*(name for name in ("q", "k") if name in given), "positions")
    return given.cost(read + rows * reach(given["cos_sin_cache"][:1]))


@kind("cache_update")
def cache_update(given: Given) -> Cost:
    """The caches may be written in place."""
    slots, new = given.index("slot_mapping"), [name for name in ("k", "v", "ckv", "kpe", "new") if name in given]
    read = int((slots >= 0).sum()) * sum(reach(given[name][:1]) for name in new)
    return Cost(2 * read + given.read("slot_mapping"), read, 0, given.dtype)


@kind("rope_store")
def rope_store(given: Given) -> Cost:
    """What it rotates is written, as are the tokens' rows of the caches, which may be written in place."""
    rows = len(given.index("positions").unique())
    rotated = given.read("q", "k")
    read = rotated + given.read("v", "positions", "slot_mapping") + rows * reach(given["cos_sin_cache"][:1])
    return Cost(read + rotated + given.read("k", "v"), read, 0, given.dtype)


@kind("slot_mapping")
def slot_mapping(given: Given) -> Cost:
    """Of the table, entries of some pages."""
    return given.cost(given.read("query_start_loc", "positions"))

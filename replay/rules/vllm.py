"""Rules for vLLM's operators that its CPU and its CUDA builds share."""

from __future__ import annotations

import torch

from kcap.replay.bind import Bound
from kcap.replay.rules import Rule, rule
from kcap.replay.rules.lookup import rows_in_use
from kcap.replay.rules.paging import renumber_slots, shrink
from kcap.schemas.values import TensorSpec


def below(bound: Bound, name: str, limit: int) -> None:
    """Make sure that the integer tensor `name` holds values in [0, limit), drawing them if none were recorded."""
    spec = bound[name]
    if not isinstance(spec, TensorSpec):
        return
    known = bound.content(name)
    drawn = torch.randint(0, max(limit, 1), spec.shape) if known is None else known.clamp(0, max(limit - 1, 0))
    bound.set_content(name, drawn)


def zeros(bound: Bound, *names: str) -> None:
    """Integer tensors that the operator only writes."""
    for name in names:
        spec = bound[name]
        if isinstance(spec, TensorSpec) and bound.content(name) is None:
            bound.set_content(name, torch.zeros(spec.shape, dtype=torch.int64))


def cache_slots(bound: Bound, page_size: int, caches: tuple[str, ...]) -> None:
    """Keep the recorded slots on dense pages; without them, one slot a token from the first page on."""
    spec = bound.spec("slot_mapping")
    slots = bound.content("slot_mapping")
    if slots is None:
        room = bound.spec(caches[0]).shape[0] * page_size
        slots = torch.arange(spec.numel).reshape(spec.shape) % max(room, 1)
    dense, pages = renumber_slots(slots, page_size)
    bound.set_content("slot_mapping", dense)
    shrink(bound, caches, pages)


def slots_touched(bound: Bound, total: int, page_size: int, caches: tuple[str, ...]) -> int:
    """`total` bytes less the slots of the pages in use that nothing is written to."""
    for name in caches:
        cache = bound.spec(name)
        slots = max(cache.shape[0] * page_size, 1)
        unwritten = max(slots - bound.spec("slot_mapping").numel, 0)
        total -= unwritten * cache.numel * cache.bits // 8 // slots
    return total


@rule("_C::rotary_embedding")
class RotaryEmbedding(Rule):
    def prepare(self, bound: Bound) -> None:
        below(bound, "positions", bound.spec("cos_sin_cache").shape[0])

    def cut(self, bound: Bound) -> None:
        rows_in_use(bound, "cos_sin_cache", "positions")

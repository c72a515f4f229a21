"""Rules for SGLang's operators (read in sglang/kernels/ops of 0.5.23 and sglang/jit_kernel of 0.5.15)."""

from __future__ import annotations

import torch

from kcap.replay.bind import Bound
from kcap.replay.rules import Rule, rule
from kcap.replay.rules.lookup import rows_in_use
from kcap.replay.rules.paging import renumber, shrink
from kcap.replay.rules.vllm import below
from kcap.replay.skip import Skip
from kcap.schemas.families.sglang_classes import ROTARY


def slots_in_use(bound: Bound, name: str, skipped: int, caches: tuple[str, ...]) -> None:
    """Renumber the slots called `name` densely and cut the caches, of one row a page, down to them.

    `skipped`, where nothing is written, becomes slot 0, and no other slot does; negative: none is skipped. Without
    recorded slots every token has one of its own.
    """
    spec, slots, first = bound.spec(name), bound.content(name), 1 if skipped >= 0 else 0
    if slots is None:
        slots = torch.arange(spec.numel).reshape(spec.shape) + skipped + 1
    if slots.numel() and int(slots.min()) < 0:
        raise Skip(f"its slots ({name}) are negative: the kernel would stop the GPU")
    dense, rows = renumber(torch.where(slots == skipped, -1, slots))
    bound.set_content(name, torch.where(dense < 0, 0, dense + first))
    shrink(bound, caches, rows + first)


@rule("sglang::store_cache")
class StoreCache(Rule):
    """Caches are rows of all heads; newer releases skip the slot that pads a graph's batch."""

    harmless = ("k_cache", "v_cache")

    def prepare(self, bound: Bound) -> None:
        given = bound["reserved_skip_index"]
        skipped = given if isinstance(given, int) else -1
        slots_in_use(bound, "indices", skipped, self.harmless)
        bound.set_value("size_limit", 0)  # the rows of the caches
        if skipped >= 0:
            bound.set_value("reserved_skip_index", 0)


@rule("sglang::apply_rope_inplace", *(f"sglang_op::{name}" for name in ROTARY))
class Rope(Rule):
    def prepare(self, bound: Bound) -> None:
        below(bound, "positions", bound.spec("cos_sin_cache").shape[0])

    def cut(self, bound: Bound) -> None:
        rows_in_use(bound, "cos_sin_cache", "positions")


@rule("sglang::apply_rope_inplace_with_kvcache")
class RopeAndStore(Rope):
    """It rotates, and stores the rotated keys and the values: positions and slots."""

    harmless = ("k_cache", "v_cache")

    def prepare(self, bound: Bound) -> None:
        super().prepare(bound)
        slots_in_use(bound, "out_loc", -1, self.harmless)

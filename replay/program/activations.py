"""Memory that a Program's Calls share, as an engine's activations do: what one wrote, the next finds in the caches.

Which output is which input no record tells, so floats of one dtype and of like size (up to the next power of two) share
a buffer, the first such storage of each Call the first one, the second the second.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

import torch

from kcap.replay.bind import Bound
from kcap.replay.layout import Target, key_of
from kcap.replay.memory import Key, plan
from kcap.schemas.dtypes import BY_NAME

Place: TypeAlias = tuple[str, str, int, int]  # device, dtype, bytes, which of a Call's


class Activations:
    """The buffers of one Program."""

    def __init__(self) -> None:
        self.buffers: dict[Place, torch.Tensor] = {}

    def give(self, bound: Bound, target: Target, kept: frozenset[Key]) -> dict[Key, torch.Tensor]:
        """A buffer for each storage of `bound` that holds floats of one dtype, except those in `kept`."""
        sizes = plan(bound, target.device, target.home)
        seen: Counter[tuple[str, str, int]] = Counter()
        given: dict[Key, torch.Tensor] = {}
        for key, dtype in float_storages(bound, target).items():
            if key in kept:
                continue
            kind = key[0], dtype, 1 << (sizes[key] - 1).bit_length()
            given[key] = self._buffer((*kind, seen[kind]))
            seen[kind] += 1
        return given

    def _buffer(self, place: Place) -> torch.Tensor:
        if place not in self.buffers:
            device, _, size, _ = place
            self.buffers[place] = torch.zeros(size, dtype=torch.uint8, device=device)
        return self.buffers[place]

    @property
    def bytes(self) -> int:
        return sum(len(buffer) for buffer in self.buffers.values())


def float_storages(bound: Bound, target: Target) -> dict[Key, str]:
    """The storages that hold floats of one dtype and nothing else, with that dtype."""
    dtypes: dict[Key, set[str]] = {}
    for _, spec in bound.tensors():
        dtypes.setdefault(key_of(spec, target), set()).add(spec.dtype)
    single = {key: next(iter(names)) for key, names in dtypes.items() if len(names) == 1}
    return {key: name for key, name in single.items() if BY_NAME[name].kind == "float"}

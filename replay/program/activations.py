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
from kcap.replay.memory import ALIGN, Key, plan
from kcap.schemas.dtypes import BY_NAME

Kind: TypeAlias = tuple[str, str, int]  # device, dtype, bytes up to the next power of two
Place: TypeAlias = tuple[str, str, int, int]  # a Kind, and which of a Call's it is


class Activations:
    """The buffers of one Program."""

    def __init__(self) -> None:
        self.buffers: dict[Place, torch.Tensor] = {}

    def places(self, bound: Bound, target: Target, kept: frozenset[Key]) -> dict[Key, Place]:
        """The place of each storage of `bound` on the target that holds floats of one dtype, except those in `kept`.

        The host's are the Call's own: they may have to be pinned.
        """
        sizes = plan(bound, target.device, target.home)
        seen: Counter[Kind] = Counter()
        found: dict[Key, Place] = {}
        for key, dtype in float_storages(bound, target).items():
            if key in kept or key[0] != target.device:
                continue
            kind = kind_of(key[0], dtype, sizes[key])
            found[key] = (*kind, seen[kind])
            seen[kind] += 1
        return found

    def buffer(self, place: Place) -> torch.Tensor:
        """The bytes that all who have this place share."""
        if place not in self.buffers:
            device, _, size, _ = place
            self.buffers[place] = torch.zeros(size, dtype=torch.uint8, device=device)
        return self.buffers[place]

    def all_of(self, kind: Kind) -> list[torch.Tensor]:
        """The buffers of this kind."""
        return [buffer for place, buffer in self.buffers.items() if place[:3] == kind]

    @property
    def bytes(self) -> int:
        return sum(len(buffer) for buffer in self.buffers.values())


def kind_of(device: str, dtype: str, size: int) -> Kind:
    """The kind of a storage of `size` bytes."""
    return device, dtype, 1 << (max(size, ALIGN) - 1).bit_length()


def float_storages(bound: Bound, target: Target) -> dict[Key, str]:
    """The storages that hold floats of one dtype and nothing else, with that dtype."""
    dtypes: dict[Key, set[str]] = {}
    for _, spec in bound.tensors():
        dtypes.setdefault(key_of(spec, target), set()).add(spec.dtype)
    single = {key: next(iter(names)) for key, names in dtypes.items() if len(names) == 1}
    return {key: name for key, name in single.items() if BY_NAME[name].kind == "float"}

"""What one Call of a Program returns, the next one reads: where an operator allocates its output, the input of that
kind behind it lies there, as in the engine. So it is in the caches when it is read.

The kinds are those of kcap.replay.program.activations, whose buffers are taken where nothing was returned.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kcap.replay.inputs import Inputs
from kcap.replay.memory import reached
from kcap.replay.program.activations import Kind, Place, kind_of
from kcap.replay.program.parts import Part
from kcap.replay.rebuild import over


class Flow:
    """One run of a Program, each of whose invocations goes through it; `latest`: the last output of each kind."""

    def __init__(self) -> None:
        self.latest: dict[Place, torch.Tensor] = {}

    def run(self, part: Part) -> None:
        """One invocation of `part`."""
        self._keep(part.call_on(self._joined(part, part.next())))

    def _joined(self, part: Part, inputs: Inputs) -> Inputs:
        """`inputs` over the latest outputs that have room for them."""
        found = {key: self.latest[place] for key, place in part.places.items() if place in self.latest}
        if not found:
            return inputs
        assert part.decided is not None
        sizes = reached(part.decided.bound, part.target.device, part.target.home)
        fitting = {key: buffer for key, buffer in found.items() if len(buffer) >= sizes[key]}
        return over(part.decided, part.target, inputs, fitting)

    def _keep(self, returned: Any) -> None:
        seen: Counter[Kind] = Counter()
        for output in tree_leaves(returned):
            if not isinstance(output, torch.Tensor) or not output.is_floating_point():
                continue
            storage = output.untyped_storage()
            kind = kind_of(str(output.device), str(output.dtype).removeprefix("torch."), storage.nbytes())
            self.latest[(*kind, seen[kind])] = of_bytes(output)
            seen[kind] += 1


def of_bytes(output: torch.Tensor) -> torch.Tensor:
    """The whole storage of `output`."""
    size = output.untyped_storage().nbytes()
    return torch.empty(0, dtype=torch.uint8, device=output.device).set_(output.untyped_storage(), 0, (size,), (1,))

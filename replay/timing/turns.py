"""Invocations in turns over several sets of inputs, and what they return."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kcap.replay.inputs import Inputs


class Turns:
    """Called, it runs `call` once, each time on the next of `sets`.

    The last `keep` results are kept, so that the next ones lie elsewhere.
    """

    def __init__(self, call: Callable[..., Any], sets: Sequence[Inputs], keep: int) -> None:
        self._call, self._sets, self._next = call, sets, cycle(sets)
        self._kept: deque[Any] = deque(maxlen=keep)

    def __call__(self) -> None:
        inputs = next(self._next)
        self._kept.append(self._call(*inputs.args, **inputs.kwargs))

    def returned(self) -> int:
        """Bytes of what the last invocation returned, its inputs not counted; they are let go."""
        own = {buffer.untyped_storage().data_ptr() for inputs in self._sets for buffer in inputs.buffers.values()}
        leaves = [one for result in self._kept for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        found = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in leaves}
        self._kept.clear()
        return sum(size for place, size in found.items() if place not in own)

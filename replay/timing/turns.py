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
    """Called, it runs `call` once, each time on the next of `sets`. What it returns lies at `places`, at least one, in
    turns: so many results are kept, and the oldest is let go before the next is made."""

    def __init__(self, call: Callable[..., Any], sets: Sequence[Inputs], places: int = 1) -> None:
        self._call, self._sets, self._next = call, sets, cycle(sets)
        self._places = places
        self._results: deque[Any] = deque()

    def __call__(self) -> None:
        inputs = next(self._next)
        if len(self._results) == self._places:
            self._results.popleft()
        self._results.append(self._call(*inputs.args, **inputs.kwargs))

    def result_bytes(self) -> int:
        """Of what the last invocation returned, its inputs not counted."""
        own = {buffer.untyped_storage().data_ptr() for inputs in self._sets for buffer in inputs.buffers.values()}
        leaves = tree_leaves(list(self._results)[-1:])
        tensors = [one for one in leaves if isinstance(one, torch.Tensor) and one.layout is torch.strided]
        found = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        return sum(size for place, size in found.items() if place not in own)

    def let_go(self) -> None:
        """Keep no result."""
        self._results.clear()

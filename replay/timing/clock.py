"""Time a callable on its inputs by the clock that is theirs: the GPU's where a tensor lies there, else the host's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kcap.replay import memory
from kcap.replay.inputs import Inputs
from kcap.replay.timing.cuda import sets_needed, time_cuda
from kcap.replay.timing.host import LONGEST_IN_PLACE, LONGEST_LOOP, time_host
from kcap.replay.timing.result import Timing
from kcap.replay.timing.stop import Budget

RESTORED_BYTES = 64 << 20  # written arguments up to this size are restored before each sample of the clock


@dataclass(frozen=True)
class Size:
    """Bytes of one set of inputs, and of these what one invocation can reach."""

    total: int
    touched: int


def time_on(
    device: str,
    call: Callable[..., Any],
    first: Inputs,
    clone: Callable[[], Inputs],
    size: Size,
    restored: list[memory.Key],
    budget: Budget,
) -> Timing:
    """Time `call` on `first`, and on a GPU on as many clones as keep it cold. `restored`: the buffers it writes."""
    if not uses_gpu(first):
        longest = LONGEST_IN_PLACE if restored else LONGEST_LOOP
        return time_host(call, first, restorer([first], restored), budget, longest)
    more = sets_needed(size.total, size.touched, memory.free(device), device) - 1
    sets = [first, *(clone() for _ in range(more))]
    return time_cuda(call, sets, size.touched, restorer(sets, restored), budget, device)


def uses_gpu(inputs: Inputs) -> bool:
    """Whether a tensor lies on a GPU or one is made there; the rest is the host's work."""
    given = [*inputs.args, *inputs.kwargs.values()]
    made = any(isinstance(value, torch.device) and value.type == "cuda" for value in given)
    return made or any(place.startswith("cuda") for place, _ in inputs.buffers)


def restorer(sets: list[Inputs], keys: list[memory.Key]) -> Callable[[], None]:
    """What puts the storages `keys` of every set back to the content they have now."""
    saved = {key: sets[0].buffers[key] for key in keys}
    if sum(len(buffer) for buffer in saved.values()) > RESTORED_BYTES:
        return lambda: None
    saved = {key: buffer.clone() for key, buffer in saved.items()}

    def restore() -> None:
        for inputs in sets:
            for key, content in saved.items():
                inputs.buffers[key].copy_(content)

    return restore

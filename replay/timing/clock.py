"""Time a callable on its inputs by the clock that is theirs: the GPU's where a tensor lies there, else the host's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kcap.replay import memory
from kcap.replay.inputs import Inputs
from kcap.replay.timing.cuda import time_cuda
from kcap.replay.timing.host import LONGEST_IN_PLACE, LONGEST_LOOP, time_host
from kcap.replay.timing.result import Timing
from kcap.replay.timing.rotation import Rotation
from kcap.replay.timing.saved import Saved
from kcap.replay.timing.stop import Budget


def time_on(
    device: str,
    call: Callable[..., Any],
    first: Inputs,
    rotation: Rotation,
    restored: list[memory.Key],
    seconds: float,
    profiled: bool = False,
) -> Timing:
    """Time `call` on `first`, and on a GPU on the clones that its `rotation` asks for. `restored`: what it writes to.

    `seconds`: of sampling. `profiled`: on a GPU the durations of its kernels, too.
    """
    if uses_gpu(first):
        return time_cuda(call, first, rotation, restored, Budget.on(device, seconds), device, profiled)
    saved = Saved.of(first, restored)
    longest = LONGEST_IN_PLACE if restored else LONGEST_LOOP
    return time_host(call, first, lambda: saved.restore([first]), Budget.on("cpu", seconds), longest)


def uses_gpu(inputs: Inputs) -> bool:
    """Whether a tensor lies on a GPU or one is made there; the rest is the host's work."""
    given = [*inputs.args, *inputs.kwargs.values()]
    made = any(isinstance(value, torch.device) and value.type == "cuda" for value in given)
    return made or any(place.startswith("cuda") for place, _ in inputs.buffers)

"""What a Program's kernels write to, put back before each run of it: else numbers grow from run to run."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kcap.replay.program.parts import Part

MOST_BYTES = 1 << 30  # what is beyond is left as it is


class Restoring:
    """The content of every storage that some Call writes to, each once."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.left = 0  # storages that were too large
        seen: set[int] = set()
        room = MOST_BYTES
        for buffer in (s.buffers[key] for part in parts for s in part.sets for key in part.restored):
            if id(buffer) in seen:
                continue
            seen.add(id(buffer))
            if len(buffer) > room:
                self.left += 1
                continue
            room -= len(buffer)
            self.saved.append((buffer, buffer.clone()))

    def __call__(self) -> None:
        for buffer, content in self.saved:
            buffer.copy_(content)

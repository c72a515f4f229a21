"""What a Program's kernels write to, put back before each sample of it: else numbers grow from sample to sample."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kcap.replay.program.parts import Part

MOST_BYTES = 1 << 30  # what is beyond is left as it is


class Restoring:
    """The content of every storage that some Call writes to, each once, as it was before anything ran."""

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

    @property
    def notes(self) -> list[str]:
        """What to know of what is not put back."""
        return [f"written to, and too large to be put back between samples: {self.left}"] if self.left else []

    def __call__(self) -> None:
        for buffer, content in self.saved:
            buffer.copy_(content)

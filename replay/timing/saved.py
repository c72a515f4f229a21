"""What a call writes to, put back to what it held: in each sample it finds what it found in the first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kcap.replay.inputs import Inputs
from kcap.replay.memory import Key

MOST_BYTES = 64 << 20  # of one set; what is larger is not restored


@dataclass(frozen=True)
class Saved:
    """The content of the storages that a call writes to; none where they are too large."""

    content: dict[Key, torch.Tensor]

    @classmethod
    def of(cls, inputs: Inputs, keys: Iterable[Key]) -> Saved:
        """The storages `keys` of `inputs` as they are now."""
        found = {key: inputs.buffers[key] for key in keys}
        if sum(len(buffer) for buffer in found.values()) > MOST_BYTES:
            return cls({})
        return cls({key: buffer.clone() for key, buffer in found.items()})

    def restore(self, sets: Iterable[Inputs]) -> None:
        """Write it back into every set; a storage that several sets share once."""
        done: set[int] = set()
        for inputs in sets:
            for key, content in self.content.items():
                buffer = inputs.buffers[key]
                if id(buffer) not in done:
                    done.add(id(buffer))
                    buffer.copy_(content)

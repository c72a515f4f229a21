"""The blocks of a prompt's tokens by a keyed hash: two prompts that begin alike have the same first blocks.

As in Mooncake's traces a block's number stands for all tokens up to its end. The Recording numbers the blocks anew, in
the order in which they came, so that nothing of the tokens or of the hash is left.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BLOCK = 16  # tokens, where the engine does not tell those of its own blocks, or they are too small
NUMBER = 6  # bytes: a whole number in every JSON reader


class BlockHashes:
    """Of blocks of `size` tokens; the last one may be shorter."""

    def __init__(self, key: str, size: int) -> None:
        self.size = size
        self._empty = hashlib.blake2b(key=key.encode()[:64], digest_size=NUMBER)

    def of(self, tokens: Sequence[int]) -> list[int]:
        """One number for each block."""
        content = memoryview(array("q", tokens)).cast("B")
        hashed, width, numbers = self._empty.copy(), 8 * self.size, []
        for start in range(0, len(content), width):
            hashed.update(content[start : start + width])
            numbers.append(int.from_bytes(hashed.digest(), "big"))
        return numbers

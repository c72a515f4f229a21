"""Files that can still be opened: what must not stop halfway asks for them first."""

from __future__ import annotations

import os


def ensure_free_descriptors(count: int) -> None:
    """OSError, where this process cannot open `count` files more."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise OSError(error.errno, error.strerror) from None  # whatever the file
    finally:
        for descriptor in opened:
            os.close(descriptor)

"""The part of the L2 that a program set aside for data of its own: it survives every eviction, so it is given back."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any


def reset() -> bool:
    """Make every persisting line of the current context's L2 an ordinary one; whether the runtime could be asked."""
    library = runtime()
    try:
        return library is not None and library.cudaCtxResetPersistingL2Cache() == 0
    except AttributeError:  # a runtime older than 11.0
        return False


@cache
def runtime(maps: Path = Path("/proc/self/maps")) -> Any:
    """The CUDA runtime that torch loaded into this process; None where there is none."""
    paths = (line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if "libcudart" in line)
    for path in dict.fromkeys(paths):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None

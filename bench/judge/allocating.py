"""How malloc keeps memory in the processes that are judged: as a server's allocator does, which gives none back.

glibc gives large blocks back to the kernel when they are freed, or not, by a threshold that it moves as it goes. Then
one process faults its pages in again at each call, another in none, and who frees an output between two calls pays for
it there: times would tell of that.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
NEVER = -1


def keep_memory() -> None:
    """For this process and those that it forks, where the C library has such settings."""
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is not None:
        setting(M_TRIM_THRESHOLD, NEVER)
        setting(M_MMAP_MAX, 0)
